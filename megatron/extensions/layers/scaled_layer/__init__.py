"""Layers whose output is multiplied by a scalar that is stored in the checkpoint, as in Gemma 4.

The extension is enabled by --layer-module scaled_layer. The implementation is in `layer.py`.
"""
