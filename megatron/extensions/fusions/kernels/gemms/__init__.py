"""GEMMs that add to what is there, which torch does not do, or not in one pass: to gradients and residual streams."""
