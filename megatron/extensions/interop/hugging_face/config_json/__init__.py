"""Keys of config.json: values by type, layers, rotary embeddings, and adapters of families with rules of their own."""
