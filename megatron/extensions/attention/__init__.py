"""Kinds of softmax attention, and context parallelism for them."""
