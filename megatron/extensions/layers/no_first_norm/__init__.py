"""Layers of which the first one has no norm before attention, as in ModernBERT. Enabled by --layer-module
no_first_norm. Read `layer.py`.
"""
