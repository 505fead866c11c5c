"""Norms with a gate: the output is multiplied by a gate that a low-rank MLP computes from it, as in A.X K2.

Chosen by --layer-module gated_norms. Its flag: --gated-norm-rank.

Read first: `layer.py`.
"""
