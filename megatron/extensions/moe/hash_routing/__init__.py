"""Hash routing: in the first layers, the token id determines the experts, as in DeepSeek-V4.

Flag: --moe-n-hash-layers. The implementation is in `hash_router.py`.
"""
