"""Data parallelism: flat buffers of parameters and gradients, overlapped gradient reduction, ZeRO-1 sharding."""
