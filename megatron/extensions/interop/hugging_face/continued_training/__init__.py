"""Training that continues from a Hugging Face folder in --load: flags, weights, and changes of its rotary positions."""
