"""Layer parts other than mixers: activations, residual streams, layer patterns."""
