"""What a run measures and reports: losses, speed, expert load, samples, and the files these are written to."""
