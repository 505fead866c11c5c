"""Attention and Mamba-2 side by side in a layer, as Falcon-H1 has them: both read the same normalized input, and the
residual stream receives the sum of their outputs.

Chosen by the letter H of --hybrid-layer-pattern, or by --experimental-attention-variant attention_and_mamba2 in layers
that also have an MLP. Flags: those of the model's attention, of Mamba-2, and factors of inputs, keys and outputs.

Read first: `parallel_mixers.py`, the module.
"""
