"""Further ways to route tokens to experts: Sinkhorn routing, SparseMixer weights, and random choices for benchmarks.

Flags: --moe-router-load-balancing-type sinkhorn, --moe-router-score-function sparsemixer with --moe-sparsemixer-eps,
--moe-router-force-load-balancing. Read `routers.py`.
"""
