"""Layers of one sublayer each, which a pattern of Megatron-LM's letters states, as in Nemotron-H.

Flag: --hybrid-layer-pattern. Read `pattern.py`.
"""
