"""Deletion of older checkpoints after each save.

Flags: --keep-last, --keep-every, --save-retain-best. Read `retention.py`.
"""
