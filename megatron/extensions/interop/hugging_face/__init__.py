"""Support for Hugging Face folders. A run can start from a folder (--load) and export its checkpoints
(--export-hf-interval, --export-hf-dir). Checkpoints can also be converted in both directions.

Read `families` first, which defines how the description of a `model_type` is stored. `read_config`, `write_config` and
`config_json` translate config.json. `weights` and `layouts` translate the tensors. `continued_training` starts a run
from a Hugging Face folder, and `export` writes such folders during training.
"""
