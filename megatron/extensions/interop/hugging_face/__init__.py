"""Hugging Face folders: start a run from a folder (--load), convert checkpoints in both directions, and export a run's
checkpoints (--export-hf-interval, --export-hf-dir).

Start with `families`, which describes each `model_type`. `read_config`, `write_config` and `config_json` translate
config.json. `weights` and `layouts` translate the tensors. `continued_training` starts a run from a folder, and
`export` writes folders during training.
"""
