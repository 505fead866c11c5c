"""Layers with one sublayer each, as in Nemotron-H. A pattern in Megatron-LM's letters specifies the layers.

Flag: --hybrid-layer-pattern. Read `pattern.py`.
"""
