"""Gradient noise scale: the batch size above which larger batches save few steps (arXiv:1812.06162).

Flags: --log-noise-scale, --noise-scale-window. Start with `estimate.py`, which contains the arithmetic. `measure.py`
measures the gradient norms of a small and a large batch in each step.
"""
