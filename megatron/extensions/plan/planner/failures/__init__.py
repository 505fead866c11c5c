"""Expected cost of failures: goodput, the best save interval, and spare nodes."""
