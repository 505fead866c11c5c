"""Measurements and reports of a run: losses, speed, expert load, samples, and the files to which they are written."""
