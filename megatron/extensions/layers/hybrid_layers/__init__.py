"""Layers with one sublayer each, given by a pattern in Megatron-LM's letters, as in Nemotron-H.

Flag: --hybrid-layer-pattern. Read `pattern.py`.
"""
