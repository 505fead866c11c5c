"""A linear layer, a GELU and a second norm between the final norm and the output layer, as in ModernBERT's decoder.

Enabled by --dense-head. The implementation is in `head.py`.
"""
