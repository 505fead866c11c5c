"""Mamba-2: a state-space layer that replaces most attention layers of Nemotron-H.

The mixer is selected by the letter M of --hybrid-layer-pattern, or by --experimental-attention-variant mamba2 in layers
that also have an MLP. Shape flags: --mamba-num-heads, --mamba-head-dim, --mamba-num-groups, --mamba-state-dim,
--mamba-conv-kernel-dim and --mamba-chunk-size.

Read `mamba2.py` first, which contains the module. `ssd.py` computes the recurrence over tokens.
"""
