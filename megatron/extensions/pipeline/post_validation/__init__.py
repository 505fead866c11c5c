"""Optimizer updates before the global gradient norm is known, rolled back if the norm requires it.

Flag: `--optimizer-post-validation`. Read `post_validation.py`.
"""
