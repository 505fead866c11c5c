"""Softmax attention variants, and context parallelism for them."""
