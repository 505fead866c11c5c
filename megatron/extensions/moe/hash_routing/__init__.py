"""Routing by hashes of tokens: experts of the first layers follow from a token's id alone, as in DeepSeek-V4.

Flag: --moe-n-hash-layers.

Read first: `hash_router.py`, the router.
"""
