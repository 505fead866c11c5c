"""Layers whose output is multiplied by a stored number, as in Gemma 4.

Enabled by --layer-module scaled_layer. Read `layer.py`.
"""
