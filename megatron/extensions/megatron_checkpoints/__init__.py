"""Conversion of checkpoints between formats, one tensor at a time."""
