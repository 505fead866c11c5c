"""Data parallelism with flat buffers of parameters and gradients, overlapped gradient reduction, and ZeRO sharding."""
