"""Less memory per device: states and activations on the host."""
