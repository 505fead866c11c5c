"""Attention kernels in addition to torch's, and the choice between them on a GPU. Read `choice.py` first."""
