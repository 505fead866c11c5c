"""Attention and Mamba-2 side by side in one layer, as in Falcon-H1: both read the same normalized input, and the
residual stream receives the sum of their outputs.

Chosen by the letter H of --hybrid-layer-pattern, or by --experimental-attention-variant attention_and_mamba2 in layers
that also have an MLP. Flags: those of the model's attention and of Mamba-2, and scale factors of inputs, keys and
outputs.

Read first: `parallel_mixers.py`, the module.
"""
