"""Short convolutions between two gates, as LFM2 has them in place of most attention.

Chosen by the letter C of --hybrid-layer-pattern, or by --experimental-attention-variant short_convolution in layers
that also have an MLP. Flags of their shape: --short-conv-kernel-dim and --short-conv-bias.

Read first: `short_convolution.py`, the module.
"""
