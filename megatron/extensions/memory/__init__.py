"""Techniques that reduce memory per device: states and activations in host memory."""
