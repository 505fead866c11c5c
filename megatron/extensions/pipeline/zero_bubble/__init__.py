"""Zero-bubble pipeline schedules (arXiv 2401.10241): weight gradients are delayed until a rank would be idle.

Values of `--pipeline-schedule`: zb-h1, zb-h2, zb-v. Read `schedules.py`.
"""
