"""Upcycling: initialization of an MoE model from a dense model, so that both models have the same outputs at step 0.
The dense model may be a checkpoint of this program or a Hugging Face model.

The extension is enabled by --moe-use-upcycling. Read `flags.py` first, then `dense_start.py`, which loads the weights.
"""
