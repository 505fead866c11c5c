"""Run the forward and backward pass of a micro-batch as one CUDA graph, which is replayed with a single launch.

Flags: `--cuda-graph-impl local`, `--cuda-graph-warmup-steps`. Read `graphed_microbatches.py`.
"""
