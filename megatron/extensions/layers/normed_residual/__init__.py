"""Layers whose sublayers add to their normalized inputs, as MiniMax-Text-01 has them.

Chosen by --layer-module normed_residual. Its flag: --residual-weight.

Read first: `layer.py`.
"""
