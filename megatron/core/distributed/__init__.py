"""Data parallelism: flat buffers of parameters and gradients, and their reduction."""
