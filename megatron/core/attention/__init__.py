"""Core attention: kernels, masks as tiles, packed documents, and context parallelism."""
