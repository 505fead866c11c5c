"""Additional context parallelism methods: all-gather of keys and values, and all-to-all of heads (DeepSpeed Ulysses),
over all ranks or within a node.

These methods are the values all_gather, a2a and a2a+p2p of `--cp-comm-type`. The implementation is in `attention.py`.
"""
