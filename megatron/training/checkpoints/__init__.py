"""Checkpoints of a run: their contents, their saves, and checks that a checkpoint fits the run that loads it."""
