"""Hugging Face folders: starts a run from one (--load), converts checkpoints to and from them, and exports a run's
checkpoints (--export-hf-interval, --export-hf-dir).

Start with `families`, which describes each `model_type`. `read_config` and `write_config` translate config.json,
together with `config_json`; `weights` and `layouts` translate the tensors. `continued_training` starts a run from a
folder, and `export` writes folders during training.
"""
