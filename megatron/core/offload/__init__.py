"""Tensors in host memory while the device does not need them."""
