"""Overlap of the collectives within layers with computation.

- `comm_overlap.py`: linear layers that send or receive part by part while they multiply (--tp-comm-overlap).
- `batch_overlap.py`: two micro-batches, one of which computes while the all-to-alls of the other's experts are in
  flight (--overlap-moe-expert-parallel-comm).
"""
