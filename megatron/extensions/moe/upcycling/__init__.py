"""Mixtures of experts that start from a dense model, ours or Hugging Face's, and compute the same as it does at step 0.

Switched on by --moe-use-upcycling. Read `flags.py`, then `dense_start.py`, which loads the weights.
"""
