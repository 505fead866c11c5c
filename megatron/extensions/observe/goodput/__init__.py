"""Goodput: the fraction of a run's wall time that was spent on useful training. The wall time includes all starts of
the run.

Flags: --log-goodput.

Start with `accounts`, which defines the parts of the wall time and adds up the starts of a run from `run_events.jsonl`.
`hooks` measures the parts during one start.
"""
