"""What becomes of Megatron's flags that no field here has: read as others, without effect, or refused as not built.

It has no flags of its own. The tables are in `megatron_flags.toml`, which `flags` reads when an unknown flag is met;
`megatron_differences` lists results that differ from Megatron-LM's under equal flags, which `--dry-run` prints.
"""
