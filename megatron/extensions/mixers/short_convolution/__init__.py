"""Short convolution between two gates, which replaces most attention layers of LFM2.

The mixer is selected by the letter C of --hybrid-layer-pattern, or by --experimental-attention-variant
short_convolution in layers that also have an MLP. Shape flags: --short-conv-kernel-dim and --short-conv-bias.

The implementation is in `short_convolution.py`.
"""
