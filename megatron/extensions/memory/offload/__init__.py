"""Optimizer states and saved activations in host memory.

Flags: `--optimizer-cpu-offload` and the flags of its fraction and memory; `--cpu-offloading` and the flags of its
layers. Read `host_update.py` first for states, `saved_activations.py` for activations.
"""
