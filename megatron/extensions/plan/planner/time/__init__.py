"""Time of a training step, predicted from the same fake step as memory and FLOPs."""
