"""Self-attention with normalized values, and optionally with layers whose keys also serve as values, as in Gemma 4.

The extension is enabled by --attention-module normed_values. Flag: --global-keys-as-values.

The implementation is in `normed_values.py`.
"""
