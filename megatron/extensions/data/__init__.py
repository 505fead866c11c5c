"""Data sets, tokenizers, and phases of a run with their own data."""
