"""Treatment of Megatron's flags that have no field here: read as others, without effect, or refused as not built.

Its own flags are lists of data in Megatron's words, which `data_lists` reads into --data-path and related flags:
--data-args-path, --per-split-data-args-path, --train-weighted-split-paths and related flags. The tables are in
`megatron_flags.toml`, which `tables` reads when an unknown flag is met; `megatron_differences` lists results that
differ from Megatron-LM's under equal flags, which `--dry-run` prints.
"""
