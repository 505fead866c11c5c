"""Shortcut-connected experts, as in LongCat-Flash: what experts compute joins the residual stream a layer later.

Switched on by --moe-shortcut. Read `flags.py`, then `delayed.py`, the stream.
"""
