"""Gated norms, as in A.X K2: a low-rank MLP computes a gate from the norm's output, and the norm's output is multiplied
by this gate.

The extension is enabled by --layer-module gated_norms. Flag: --gated-norm-rank. The implementation is in `layer.py`.
"""
