"""The gradient noise scale: the batch size above which larger batches stop to save steps (arXiv 1812.06162).

Flags: --log-noise-scale, --noise-scale-window. Read `estimate.py`, which is arithmetic, first; then `measure.py`, which
takes the two norms out of a step.
"""
