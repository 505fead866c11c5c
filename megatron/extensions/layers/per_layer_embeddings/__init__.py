"""Per-layer embeddings, as in Gemma 4 E2B and E4B: each layer has a separate embedding table, and adds gated embeddings
of the tokens after the MLP. The extension is enabled by --per-layer-embedding-size. Read `flags.py` first, then
`residual.py`, which implements the residual stream.
"""
