"""Per-layer statistics (--log-layer-stats): collection, reduction, and detection of outliers."""
