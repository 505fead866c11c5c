"""Recognizes --data-path values that name text files. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.dist_checkpointing.path_kind import DataKind, DataReader
from megatron.extensions.data.text_data.inputs import find_inputs, is_text


class Text(DataKind):
    """Path kind for --data-path values that name text files. The files are tokenized before training."""

    urls = True

    def __call__(self, path: str) -> bool:
        return is_text(path)

    def describe(self, flag: str, path: str) -> str:
        """Describe the number and size of the files that `path` names. Raises ValueError if there are no files."""
        files = find_inputs([path], flag)
        size = sum(file.size for file in files)
        return f"{path}: text, {len(files)} files, {size / 1e6:,.1f} MB, tokenized when the run starts"

    def reader(
        self, data: DatasetConfig, tokenizer: TokenizerConfig, vocab_size: int | None, prepare: Callable[[], object]
    ) -> DataReader:
        from megatron.extensions.data.text_data.tokenized import TextData

        return TextData(data, tokenizer, vocab_size, prepare)


TEXT = Text()
