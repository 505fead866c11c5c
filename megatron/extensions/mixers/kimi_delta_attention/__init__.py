"""Kimi Delta Attention: a gated delta net with a decay for each channel, used in three out of four layers of Kimi
Linear.

The mixer is selected by the letter K of --hybrid-layer-pattern, or by --experimental-attention-variant
kimi_delta_attention in layers that also have an MLP. Shape flags: --kda-num-heads, --kda-head-dim and
--kda-conv-kernel-dim.

The implementation is in `kimi_delta_attention.py`.
"""
