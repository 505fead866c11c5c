"""Optimizer updates that are performed before the global gradient norm is known, and rolled back if the gradients must
be clipped or the step must be skipped. Flag: `--optimizer-post-validation`. The implementation is in
`post_validation.py`.
"""
