"""Kernels of attention beside those of torch, and the choice between them on a GPU: read `choice.py` first."""
