"""Continued training from a Hugging Face folder given by --load. Sets the model flags, loads the weights and applies
changes to the rotary embeddings."""
