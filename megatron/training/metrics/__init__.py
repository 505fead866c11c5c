"""Measurements and reports of a run: losses, speed, expert load, samples, and the files these are written to."""
