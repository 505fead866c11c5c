"""Handling of signals, failures and hangs on all ranks of a run."""
