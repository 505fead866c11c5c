"""fp8 training: scaled casts, scaling recipes, and the GEMMs of linear layers in 8-bit floating point."""
