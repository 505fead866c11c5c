"""Conversion from and to checkpoints of Megatron-LM and Megatron-DeepSpeed, including optimizer state and progress.

This extension has no flags. Read `megatron_format` first. `flags` recognizes the folders, `megatron_names` maps
parameter names, and `megatron_args` maps Megatron-LM's arguments to our configuration. `legacy_folder` reads mp_rank
folders, and `megatron_target` writes torch_dist checkpoints.
"""
