"""Conversion from and to Megatron-LM and Megatron-DeepSpeed checkpoints, including optimizer state and training
progress.

This extension has no flags. Read `megatron_format` first. `flags` recognizes checkpoint folders. `megatron_names`
converts parameter names, and `megatron_args` converts arguments to this program's configuration. `legacy_folder` reads
mp_rank folders, and `megatron_target` writes torch_dist checkpoints.
"""
