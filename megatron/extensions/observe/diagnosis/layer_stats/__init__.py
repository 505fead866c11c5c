"""Statistics of each layer (--log-layer-stats): collection, reduction, and rules that detect outliers."""
