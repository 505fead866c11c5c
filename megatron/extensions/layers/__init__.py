"""Components of layers other than mixers: activation functions, residual streams, norms and layer patterns."""
