"""A residual stream that is a mean of the embeddings and of all outputs so far in its variance, as in Beam.

Switched on by --depth-scaled-residual. Read `residual.py`.
"""
