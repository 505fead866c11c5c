"""Predict the time of a training step from the same fake step that yields the memory and the FLOPs."""
