"""Layers whose sublayers add to their normalized inputs, as in MiniMax-Text-01.

Enabled by --layer-module normed_residual. Flag: --residual-weight.

Read first: `layer.py`.
"""
