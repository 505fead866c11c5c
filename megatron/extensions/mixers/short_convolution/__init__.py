"""Short convolution between two gates, which replaces most attention layers of LFM2.

Selected by the letter C of --hybrid-layer-pattern, or by --experimental-attention-variant short_convolution in layers
that also have an MLP. Shape flags: --short-conv-kernel-dim and --short-conv-bias.

Read first: `short_convolution.py`, the module.
"""
