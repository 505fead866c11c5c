"""Time of a training step, predicted from the fake step that gives memory and FLOPs."""
