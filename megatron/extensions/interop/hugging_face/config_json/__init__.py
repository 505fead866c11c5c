"""Keys of config.json: values by type, layers, rotary embeddings, and adapters for families with special keys."""
