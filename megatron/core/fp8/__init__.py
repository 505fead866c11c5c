"""Training in 8-bit floating point."""
