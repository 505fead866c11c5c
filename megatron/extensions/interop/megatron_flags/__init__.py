"""Translation of Megatron-LM's flags that have no configuration field in this program. Each of these flags is
translated to other flags, accepted without effect, or refused as unsupported.

This extension also defines Megatron's data list flags, such as --data-args-path, --per-split-data-args-path and
--train-weighted-split-paths. `data_lists` translates these flags to --data-path and related flags. The tables are in
`megatron_flags.toml`, which `tables` reads when it encounters an unknown flag. `megatron_differences` lists known
differences between the results of this program and of Megatron-LM with the same flags. `--dry-run` prints the
differences that apply to a run.
"""
