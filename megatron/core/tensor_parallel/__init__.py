"""Tensor and sequence parallelism: linear layers, cross entropy, weight gradients and communication overlap."""
