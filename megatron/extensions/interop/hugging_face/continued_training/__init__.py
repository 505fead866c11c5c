"""Continued training from a Hugging Face folder given by --load. The modules set the model flags, load the weights and
apply changes to the rotary embeddings."""
