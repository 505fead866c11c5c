"""Offloading of optimizer states, weights and saved activations to host memory.

Flags: `--optimizer-cpu-offload`, `--cpu-offloading` and `--offload-weights`, and the flags that tune them. Read
`host_update.py` first for states, `saved_activations.py` for activations, and `streamed_units.py` for weights.
"""
