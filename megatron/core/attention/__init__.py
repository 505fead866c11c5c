"""Attention: kernels, tiles, documents, and sequences sharded over ranks."""
