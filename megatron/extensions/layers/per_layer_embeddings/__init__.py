"""Per-layer embeddings, as in Gemma 4 E2B and E4B: each layer has its own embedding table, and adds gated embeddings
after its MLP.

Enabled by --per-layer-embedding-size. Read `flags.py`, then `residual.py`, the residual stream.
"""
