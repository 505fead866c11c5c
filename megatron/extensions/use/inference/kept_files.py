"""Copies of a run's tokenizer files next to its checkpoints. With these copies, a checkpoint folder can be used even if
the original tokenizer files no longer exist."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath

from megatron.core.config.data import TokenizerConfig
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.path_kind import TOKENIZER_FOLDER as FOLDER
from megatron.core.dist_checkpointing.path_kind import saved_folders
from megatron.core.fsync import whole_file
from megatron.core.tokenizers import with_local_files
from megatron.extensions.data.tokenizers.huggingface import tokenizer_file
from megatron.extensions.data.tokenizers.special_tokens import FILES
from megatron.training.hooks import Callback, RunView
from megatron.training.run import TrainingRun

BESIDE = (*FILES, "chat_template.jinja")
"""Files next to a tokenizer.json that contain special tokens and the chat template."""

FIELDS = ("tokenizer_model", "vocab_file", "merge_file")


class KeptTokenizer(Callback):
    """Callback that copies the tokenizer files to --save. An evaluation-only run does not copy the files if --save
    already contains checkpoints."""

    def on_start(self, run: RunView) -> None:
        assert isinstance(run, TrainingRun)
        save, evaluates = self.config.checkpoint.save_root, self.config.training.skip_train
        assert save is not None
        if run.runtime.is_main and not (evaluates and saved_folders(save)):
            keep_tokenizer(self.config.tokenizer, save)


def keep_tokenizer(config: TokenizerConfig, folder: PurePath) -> None:
    """Copy the tokenizer files to `folder`/tokenizer. A file whose copy already exists with the same content is not
    copied again.

    Raises OSError if the files cannot be written."""
    for file in _files(config):
        target = folder / FOLDER / file.name
        content = file.read_bytes()
        if storage_of(target).content(target) == content:
            continue
        if not isinstance(target, Path):
            storage_of(target).write(target, content)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as temporary:
            temporary.write_bytes(content)


def found_tokenizer(config: TokenizerConfig, checkpoints: PurePath) -> TokenizerConfig:
    """Return a tokenizer configuration whose files exist. `config` is the configuration of the run that saved its
    checkpoints in the folder `checkpoints`. If the tokenizer files of the run no longer exist, the paths in the
    configuration are replaced by the paths of the copies. If there are no copies either, `config` is returned
    unchanged."""
    if _present(config):
        return config
    for folder in (checkpoints / FOLDER, checkpoints.parent / FOLDER):
        if storage_of(folder).names(folder) and _present(kept := _kept(config, folder)):
            return kept
    return config


def _named(config: TokenizerConfig) -> dict[str, str]:
    """Return the file paths in a tokenizer configuration, keyed by field name."""
    return {field: path for field in FIELDS if (path := getattr(config, field)) is not None}


def _present(config: TokenizerConfig) -> bool:
    if config.tokenizer_type == "HuggingFaceTokenizer" and config.tokenizer_model is not None:
        return bool(_files(config))
    return all(map(os.path.exists, _named(with_local_files(config)).values()))


def _kept(config: TokenizerConfig, folder: PurePath) -> TokenizerConfig:
    if config.tokenizer_type == "HuggingFaceTokenizer":
        return replace(config, tokenizer_model=str(folder))
    kept = {field: str(folder / Path(path).name) for field, path in _named(config).items()}
    change: Callable[..., TokenizerConfig] = replace
    return change(config, **kept)


def _files(config: TokenizerConfig) -> list[Path]:
    """Return the tokenizer files that exist. Remote files are returned as local copies."""
    config = with_local_files(config)
    if config.tokenizer_type == "HuggingFaceTokenizer" and config.tokenizer_model is not None:
        try:
            file = tokenizer_file(config.tokenizer_model)
        except ValueError:
            return []
        return [file, *(path for name in BESIDE if (path := file.parent / name).is_file())]
    return [Path(path) for path in _named(config).values() if os.path.isfile(path)]
