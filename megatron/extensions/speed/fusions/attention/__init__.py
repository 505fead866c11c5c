"""Attention kernels in addition to torch's, and the choice between them on a GPU: read `choice.py` first."""
