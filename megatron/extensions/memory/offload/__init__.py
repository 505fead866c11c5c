"""Offload optimizer states, weights and saved activations to host memory.

The main flags are `--optimizer-cpu-offload`, `--cpu-offloading` and `--offload-weights`. Read `host_update.py` for
optimizer states, `saved_activations.py` for activations, and `streamed_units.py` for weights.
"""
