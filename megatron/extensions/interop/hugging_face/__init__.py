"""Hugging Face folders: start a run from a folder (--load), convert checkpoints from and to folders, and export a run's
checkpoints (--export-hf-interval, --export-hf-dir).

Start with `families`, which describes each `model_type`. `read_config` and `write_config` translate config.json,
together with `config_json`; `weights` and `layouts` translate the tensors. `continued_training` starts a run from a
folder, and `export` writes folders during training.
"""
