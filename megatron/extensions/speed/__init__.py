"""Faster computation of the same model: fp8, fused kernels, overlap, CUDA graphs."""
