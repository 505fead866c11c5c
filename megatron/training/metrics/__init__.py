"""Metrics of a run, such as losses, speed and expert load, and the files and console lines that report them."""
