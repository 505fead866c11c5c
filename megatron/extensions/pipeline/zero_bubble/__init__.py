"""Zero-bubble pipeline schedules (arXiv 2401.10241): weight gradients are delayed until a rank would be idle.

These schedules are the values zb-h1, zb-h2 and zb-v of `--pipeline-schedule`. The implementation is in `schedules.py`.
"""
