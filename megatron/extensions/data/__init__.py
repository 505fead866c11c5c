"""Data sets, tokenizers, and phases of a run with data of their own."""
