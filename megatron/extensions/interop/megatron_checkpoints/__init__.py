"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, to convert from and to; optimizer state and progress included.

It has no flags. Read `megatron_format` first. `flags` recognizes their folders; `megatron_names` pairs names of
tensors, `megatron_args` their arguments with our configuration, `legacy_folder` reads mp_rank folders, and
`megatron_target` writes torch_dist checkpoints.
"""
