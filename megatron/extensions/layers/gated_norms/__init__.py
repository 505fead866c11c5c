"""Norms whose output is multiplied by a low-rank gate of itself, as in A.X K2.

Chosen by --layer-module gated_norms. Its flag: --gated-norm-rank.

Read first: `layer.py`.
"""
