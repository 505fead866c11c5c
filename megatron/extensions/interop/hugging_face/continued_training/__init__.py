"""Continued training from a Hugging Face folder in --load: flags, weights, and changes to rotary embeddings."""
