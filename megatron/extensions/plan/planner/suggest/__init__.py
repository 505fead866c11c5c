"""Evaluates the layout of a run and searches the best layouts for its model and cluster (--dry-run --suggest)."""
