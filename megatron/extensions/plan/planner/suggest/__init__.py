"""Evaluate a run's layout, and search for the best layouts of its model on its cluster (--dry-run --suggest)."""
