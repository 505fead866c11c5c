"""Additional attention kernels, and the choice of the fastest attention kernel on a GPU. Read `choice.py` first."""
