"""Statistics of each layer (--log-layer-stats): collection, reduction, and rules for what is out of line."""
