"""Self-attention with normalized values, and layers whose keys are the values too, as in Gemma 4.

Switched on by --attention-module normed_values; --global-keys-as-values is its flag.

Read `normed_values.py`.
"""
