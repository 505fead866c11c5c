"""Kimi Delta Attention, a gated delta net with a decay for each channel, as Kimi Linear has it in three of four layers.

Chosen by the letter K of --hybrid-layer-pattern, or by --experimental-attention-variant kimi_delta_attention in layers
that also have an MLP. Flags of its shape: --kda-num-heads, --kda-head-dim and --kda-conv-kernel-dim.

Read first: `kimi_delta_attention.py`, the module.
"""
