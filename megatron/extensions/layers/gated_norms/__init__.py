"""Norms with a gate: a low-rank MLP computes the gate from the norm's output, which is then multiplied by the gate, as
in A.X K2.

Chosen by --layer-module gated_norms. Its flag: --gated-norm-rank.

Read first: `layer.py`.
"""
