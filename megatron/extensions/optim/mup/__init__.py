"""muP and CompleteP: hyperparameters tuned on a small model transfer to a wider and deeper one (arXiv 2203.03466,
2505.01618).

Flags: `--use-mup`, `--mup-*`. Read `factors.py`, the table by roles, first; then `rule.py`, which applies it to initial
values and groups of parameters, and `settings.py`, which sets the multipliers of the model.
"""
