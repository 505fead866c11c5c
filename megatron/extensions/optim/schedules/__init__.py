"""Piecewise learning rate schedules, such as warm-up, hold and decay, and decayed branches of a run.

Flags: --lr-schedule, --lr-schedule-file, --branch-from, --decay-tokens, --decay-shape. Read `pieces.py` first, then
`branch.py`.
"""
