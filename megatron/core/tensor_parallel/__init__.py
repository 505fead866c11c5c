"""Tensor and sequence parallelism: linear layers, embeddings, cross entropy, weight gradients, overlap."""
