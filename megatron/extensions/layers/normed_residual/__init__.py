"""Layers in which the output of each sublayer is added to the sublayer's normalized input, as in MiniMax-Text-01.

The extension is enabled by --layer-module normed_residual. Flag: --residual-weight. The implementation is in
`layer.py`.
"""
