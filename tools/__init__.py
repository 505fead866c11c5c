"""Command-line tools for data, checkpoints, layouts and text generation; installed as the package `megatron_tools`."""
