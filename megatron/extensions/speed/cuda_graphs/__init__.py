"""Forward and backward pass of a micro-batch as one CUDA graph, which is launched at once.

Flags: `--cuda-graph-impl local`, `--cuda-graph-warmup-steps`. Read `graphed_microbatches.py`.
"""
