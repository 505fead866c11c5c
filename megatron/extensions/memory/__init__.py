"""Techniques that save device memory by keeping optimizer states, weights and activations in host memory."""
