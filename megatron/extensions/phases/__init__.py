"""Stages of a run: what the file of --data-stages says, and the plan of a run. No torch."""
