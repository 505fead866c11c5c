"""Upcycling: MoE models that start from a dense model, from our or a Hugging Face checkpoint, with the same outputs at
step 0.

Enabled by --moe-use-upcycling. Read `flags.py`, then `dense_start.py`, which loads the weights.
"""
