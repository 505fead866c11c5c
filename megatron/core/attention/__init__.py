"""Core attention: kernels, division of masks into tiles, packed documents, and context parallelism."""
