"""Shortcut-connected experts, as in LongCat-Flash: the experts' output joins the residual stream one layer later.

Switched on by --moe-shortcut. Read `flags.py`, then `delayed.py`, the stream.
"""
