"""Shortcut-connected experts, as in LongCat-Flash: the output of a layer's experts is added to the residual stream one
layer later.

Enabled by --moe-shortcut. Read `flags.py`, then `delayed.py`, which contains the residual stream.
"""
