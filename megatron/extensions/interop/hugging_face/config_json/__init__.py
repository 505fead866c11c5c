"""Keys of config.json: typed access, layer kinds, rotary embeddings, and adapters for families with special keys."""
