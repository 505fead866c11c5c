"""Reading and writing of config.json keys. The modules provide typed access to values, layer kinds, rotary embeddings,
and adapters for families with special keys."""
