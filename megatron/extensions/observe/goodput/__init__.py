"""Goodput: the share of a run's wall time, including earlier starts, that was spent on useful training.

Flags: --log-goodput.

Start with `accounts`, which defines the parts of the time and how a resumed run continues from `run_events.jsonl`.
`hooks` measures the parts of one start.
"""
