"""Layers with one sublayer each, as in Nemotron-H. A pattern specifies each layer by a letter, as in Megatron-LM. Flag:
--hybrid-layer-pattern. The implementation is in `pattern.py`.
"""
