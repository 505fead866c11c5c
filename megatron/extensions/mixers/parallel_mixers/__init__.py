"""Attention and Mamba-2 in parallel in one layer, as in Falcon-H1. Attention and Mamba-2 read the same normalized
input, and the sum of their outputs is added to the residual stream.

Selected by the letter H of --hybrid-layer-pattern, or by --experimental-attention-variant attention_and_mamba2 in
layers that also have an MLP. Flags: the flags of attention and of Mamba-2, and scale factors of inputs, keys and
outputs.

Read first: `parallel_mixers.py`, the module.
"""
