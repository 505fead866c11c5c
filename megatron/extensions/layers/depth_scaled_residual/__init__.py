"""Residual stream whose variance does not grow with depth, as in Beam. Each addition to the stream is scaled according
to its depth in the model. The extension is enabled by --depth-scaled-residual. The implementation is in `residual.py`.
"""
