"""Differential attention: the difference of two softmax attention maps, as in the Differential Transformer.

The extension is enabled by --attention-module differential_attention. Flag: --differential-lambda-std.

The implementation is in `differential_attention.py`.
"""
