"""States of the optimizer and saved activations in host memory.

Flags: `--optimizer-cpu-offload` and those of its share and memory; `--cpu-offloading` and those of its layers. Read
`host_update.py` first for states, `saved_activations.py` for activations.
"""
