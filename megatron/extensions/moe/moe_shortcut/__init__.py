"""Shortcut-connected experts, as in LongCat-Flash: the experts' output is added to the residual stream one layer later.

Enabled by --moe-shortcut. Read `flags.py`, then `delayed.py`, the residual stream.
"""
