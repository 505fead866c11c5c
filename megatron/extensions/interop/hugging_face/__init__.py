"""Hugging Face folders: a run starts from one (--load), checkpoints are converted to and from them, and a run exports
its own (--export-hf-interval, --export-hf-dir).

Read `families` first, which describes each `model_type`. `read_config` and `write_config` translate config.json, with
`config_json`, and `weights` and `layouts` the tensors. `continued_training` begins a run from a folder, `export` writes
folders while a run trains.
"""
