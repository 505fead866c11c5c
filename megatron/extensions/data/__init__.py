"""Data sets, tokenizers, and training phases that use different data."""
