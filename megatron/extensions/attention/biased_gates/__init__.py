"""Self-attention with one output gate bias per head, and with queries scaled by position, as in Beam.

The extension is enabled by --attention-module biased_gates. Flags: --query-growth-exponent and --query-growth-length.

The implementation is in `biased_gates.py`.
"""
