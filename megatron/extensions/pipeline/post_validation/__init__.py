"""Optimizer updates that are performed before the global gradient norm is known, and rolled back if the norm requires
it.

Flag: `--optimizer-post-validation`. Read `post_validation.py`.
"""
