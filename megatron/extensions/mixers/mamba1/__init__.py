"""Mamba-1: a state-space layer with a decay rate for each element of the state, used by Mamba, Falcon-Mamba and Jamba.

The mixer is selected by the letter S of --hybrid-layer-pattern, or by --experimental-attention-variant mamba1 in layers
that also have an MLP. Shape flags: --mamba1-channels, --mamba1-state-dim, --mamba1-step-rank, --mamba1-conv-kernel-dim
and --mamba1-norm.

Read `mamba1.py` first, which contains the module. `selective_scan.py` computes the recurrence over tokens.
"""
