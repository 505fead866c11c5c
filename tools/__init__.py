"""Command-line tools for data, checkpoints, layouts and text generation.

`pip install` installs the tools as the package `megatron_tools` in `paritrain/_src`.
"""
