"""Predict the cost of device failures: the goodput of a run, its best save interval, and the number of spare nodes."""
