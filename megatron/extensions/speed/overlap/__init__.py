"""Overlap the collectives of a layer with the computation of the layer.

- `comm_overlap.py`: linear layers that send or receive some parts of the sequence while they multiply other parts
  (--tp-comm-overlap).
- `batch_overlap.py`: two micro-batches, one of which computes while the other's expert all-to-alls are in flight
(--overlap-moe-expert-parallel-comm).
"""
