"""Separate embeddings for each layer, added after the MLP through a gate, as in Gemma 4 E2B and E4B.

Enabled by --per-layer-embedding-size. Read `flags.py`, then `residual.py`, the residual stream.
"""
