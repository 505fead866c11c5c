"""Attention and Mamba-2 in parallel in one layer, as in Falcon-H1. Attention and Mamba-2 read the same normalized
input, and the sum of their outputs is added to the residual stream.

The mixer is selected by the letter H of --hybrid-layer-pattern, or by --experimental-attention-variant
attention_and_mamba2 in layers that also have an MLP. The flags that configure attention and Mamba-2 also configure
this mixer. Additional flags set scale factors for inputs, keys and outputs. The implementation is in
`parallel_mixers.py`.
"""
