"""Evaluation of a run's layout, and search for the best layouts for its model and cluster (--dry-run --suggest)."""
