"""Goodput: the share of a run's wall time, earlier starts included, in which its weights were trained.

Flags: --log-goodput.

Read `accounts` first: the parts of the time, and what a resumed run takes over from `run_events.jsonl`. `hooks`
measures the parts of one start.
"""
