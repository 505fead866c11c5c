"""Self-attention whose output gates have a bias for each head, with queries scaled by their positions, as in Beam.

Switched on by --attention-module biased_gates; --query-growth-exponent and --query-growth-length are its flags.

Read `biased_gates.py`.
"""
