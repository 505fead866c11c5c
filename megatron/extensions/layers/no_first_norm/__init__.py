"""A first layer whose attention reads the embeddings without a norm, as in ModernBERT.

Switched on by --layer-module no_first_norm. Read `layer.py`.
"""
