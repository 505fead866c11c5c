"""Goodput: the fraction of a run's wall time that was spent on useful training. The wall time includes all starts of
the run.

Flags: --log-goodput.

Start with `accounts`. This module defines the parts of the wall time, and sums the seconds of each part over all starts
of a run, as recorded in `run_events.jsonl`. `hooks` measures the parts of the wall time in the running process.
"""
