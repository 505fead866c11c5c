"""Layers whose sublayers add to their normalized inputs, as in MiniMax-Text-01.

Chosen by --layer-module normed_residual. Its flag: --residual-weight.

Read first: `layer.py`.
"""
