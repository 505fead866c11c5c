"""Mamba-1, a state-space layer whose states decay at rates of their own, as Mamba, Falcon-Mamba and Jamba have it.

Chosen by the letter S of --hybrid-layer-pattern, or by --experimental-attention-variant mamba1 in layers that also have
an MLP. Flags of its shape: --mamba1-channels, --mamba1-state-dim, --mamba1-step-rank, --mamba1-conv-kernel-dim and
--mamba1-norm.

Read first: `mamba1.py`, the module; `selective_scan.py`, how it mixes tokens.
"""
