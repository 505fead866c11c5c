"""Continued training from the Hugging Face folder in --load. The modules set the model flags from config.json, load the
weights, and apply changes to the rotary embeddings."""
