"""--dry-run --suggest: a verdict on the layout of a run, and the best layouts for its model and cluster."""
