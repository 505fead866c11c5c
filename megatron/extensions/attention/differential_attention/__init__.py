"""Differential attention: the difference of two softmaxes of attention scores, as in the Differential Transformer.

Switched on by --attention-module differential_attention; --differential-lambda-std is its flag.

Read first: `differential_attention.py`, the module.
"""
