"""Additional routing methods: Sinkhorn routing, SparseMixer weights, and random routing for benchmarks.

Flags: --moe-router-load-balancing-type sinkhorn, --moe-router-score-function sparsemixer with --moe-sparsemixer-eps,
--moe-router-force-load-balancing. The implementation is in `routers.py`.
"""
