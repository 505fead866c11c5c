"""Updates before the gradient norm of the whole model is known, rolled back where the norm refuses them.

Flag: `--optimizer-post-validation`. Read `post_validation.py`.
"""
