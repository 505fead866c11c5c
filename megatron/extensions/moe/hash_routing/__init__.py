"""Hash routing: in the first layers, the token id determines the experts, as in DeepSeek-V4.

Flag: --moe-n-hash-layers.

Read first: `hash_router.py`, the router.
"""
