"""Additional context parallelism methods: all-gather of keys and values, and all-to-all of heads (DeepSpeed Ulysses),
over all ranks or within a node.

Values of `--cp-comm-type`: all_gather, a2a, a2a+p2p. Read `attention.py`.
"""
