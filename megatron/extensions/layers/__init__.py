"""Layers around the mixers: activations, residual streams, patterns of layers."""
