"""Techniques that reduce device memory: states, weights and activations in host memory."""
