"""Layers without a norm before the attention of the first layer, as in ModernBERT.

The extension is enabled by --layer-module no_first_norm. The implementation is in `layer.py`.
"""
