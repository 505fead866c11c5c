"""Command-line tools for data, checkpoints, layouts and text generation.

They are installed as the package `megatron_tools` in `paritrain/_src`.
"""
