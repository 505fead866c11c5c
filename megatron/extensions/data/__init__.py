"""Data sets, tokenizers, and run phases with their own data."""
