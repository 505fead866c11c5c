"""Shortcut-connected experts, as in LongCat-Flash: the output of a layer's routed experts is added to the residual
stream one layer later.

The extension is enabled by --moe-shortcut. Read `flags.py` first, then `delayed.py`, which contains the residual
stream.
"""
