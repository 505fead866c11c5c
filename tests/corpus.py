"""Create indexed datasets and tokenizers for tests, and simulate a full disk."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron.extensions.data.datasets.indexed_writer import IndexedDatasetBuilder


def write_documents(prefix: Path | str, documents: Iterable[Any], dtype: Any = "<u2") -> str:
    """Write an indexed dataset and return its prefix."""
    with IndexedDatasetBuilder(str(prefix), np.dtype(dtype)) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def byte_level(texts: Sequence[str] = (), special: Sequence[str] = (), size: int = 0) -> Any:
    """Train a byte-level BPE tokenizer of the `tokenizers` package on `texts`, and return the tokenizer. GPT-2's
    tokenizer has the same type. If there are no texts, the tokenizer is not trained, and each byte is a token. Special
    tokens have the first ids if the tokenizer is trained, and the last ids otherwise."""
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


FOX = "The quick brown fox jumps over the lazy dog.\n    def f(x):\n        return x + 1  # café\n"


def hf_folder(folder: Path, files: Mapping[str, Any] | None = None, special: Sequence[str] = (), **changes: Any) -> str:
    """Create a folder with a byte-level tokenizer.json and further JSON files, and return its path. `changes` replaces
    parts of tokenizer.json. The first special token is <|endoftext|>."""
    folder.mkdir(exist_ok=True)
    content = json.loads(byte_level([FOX], ["<|endoftext|>", *special], size=300).to_str())
    model = content["model"] | changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(content | changes | {"model": model}))
    for name, values in (files or {}).items():
        (folder / name).write_text(json.dumps(values))
    return str(folder)


def ending_texts(folder: Path, before: Sequence[str] = ()) -> str:
    """Create a folder with a tokenizer that appends <|endoftext|> to each text and prepends `before`, such as
    <|begin|>."""
    ids = {"<|endoftext|>": 0, "<|begin|>": 1}
    pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (*before, "<|endoftext|>")]
    pieces.insert(len(before), {"Sequence": {"id": "A", "type_id": 0}})  # type: ignore[dict-item]
    tokens = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ids.items()}
    processor = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": tokens}
    return hf_folder(folder / "ends", special=["<|begin|>"], post_processor=processor)


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes to `nbytes`, so that a write fails in the middle of a file, as
    on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        # Do not write bytecode, because the file size limit would truncate the bytecode files of modules that are
        # imported now.
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
