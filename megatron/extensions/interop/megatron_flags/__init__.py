"""Translation of Megatron-LM's flags that have no configuration field in this program. Each of these flags is
translated to other flags, accepted without effect, or refused as unsupported.

This extension's own flags are Megatron's data lists, which `data_lists` translates to --data-path and related flags:
--data-args-path, --per-split-data-args-path, --train-weighted-split-paths and related flags. The tables are in
`megatron_flags.toml`, which `tables` reads when it encounters an unknown flag. `megatron_differences` lists results
that differ from Megatron-LM's under equal flags; `--dry-run` prints them.
"""
