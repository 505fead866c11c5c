"""Residual stream whose variance does not grow with depth, because each addition is scaled according to its position,
as in Beam. Enabled by --depth-scaled-residual. Read `residual.py`.
"""
