"""Dense head: a norm, a linear layer and a GELU between the last layer and the final norm, as in ModernBERT's decoder.

The extension is enabled by --dense-head. The implementation is in `head.py`.
"""
