"""Finding out what is wrong with a run: NaNs, unequal replicas, slow ranks."""
