"""Signals, failures and hangs of a run, over all its ranks."""
