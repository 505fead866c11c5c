"""Tensor and sequence parallelism: collectives, layers, cross entropy, and layout-free random numbers."""
