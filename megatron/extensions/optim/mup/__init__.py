"""muP and CompleteP: hyperparameters tuned on a small model transfer to a wider and deeper model (arXiv 2203.03466,
2505.01618).

Flags: `--use-mup`, `--mup-*`. Read `factors.py` first, which computes the scaling factors of a parameter from the role
of the parameter. `rule.py` applies the factors to initial values and parameter groups, and `settings.py` sets the
multipliers of the model.
"""
