"""Upcycling: MoE models that start from a dense model, ours or Hugging Face's, with the same outputs at step 0.

Enabled by --moe-use-upcycling. Read `flags.py`, then `dense_start.py`, which loads the weights.
"""
