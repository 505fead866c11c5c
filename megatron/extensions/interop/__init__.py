"""Checkpoints and flags of other programs."""
