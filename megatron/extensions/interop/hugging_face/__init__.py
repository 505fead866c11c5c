"""Support for Hugging Face folders. A run can start from a folder (--load) and export its checkpoints
(--export-hf-interval, --export-hf-dir). Checkpoints can also be converted in both directions.

Read `families` first, which describes each `model_type`. `read_config`, `write_config` and `config_json` translate
config.json. `weights` and `layouts` translate the tensors. `continued_training` starts a run from a folder, and
`export` writes folders during training.
"""
