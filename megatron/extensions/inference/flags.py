"""The training program has no flags of inference; tools/generate_text.py and tools/serve.py have their own."""
