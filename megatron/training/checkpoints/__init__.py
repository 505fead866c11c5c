"""Checkpoints of a run: what they contain, when they are saved, and whether one fits the run that loads it."""
