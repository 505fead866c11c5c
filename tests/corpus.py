"""Indexed datasets and tokenizers of tests, and disks without room."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron.extensions.datasets.indexed_writer import IndexedDatasetBuilder


def write_documents(prefix: Path | str, documents: Iterable[Any], dtype: Any = "<u2") -> str:
    """Writes an indexed dataset and returns its prefix."""
    with IndexedDatasetBuilder(str(prefix), np.dtype(dtype)) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def byte_level(texts: Sequence[str] = (), special: Sequence[str] = (), size: int = 0) -> Any:
    """A byte-level BPE of `tokenizers` as GPT-2's, trained on texts; without any, a token a byte. Special tokens are
    the first of one that is trained, and the last of the other."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE() if texts else models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if texts:
        how = {"special_tokens": list(special), "initial_alphabet": letters, "show_progress": False}
        made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, **how))
    else:
        made.add_special_tokens(list(special))
    return made


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: as on a full disk, a write fails in the midst of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):  # what is imported now would be cut short on disk
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
