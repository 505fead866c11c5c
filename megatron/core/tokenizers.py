"""Two tokenizers that need no files, and the function that builds the tokenizer of `--tokenizer-type`. The tokenizer
names are the same as in Megatron-LM.

A built-in extension provides the tokenizers that read vocabulary files. The packages of these tokenizers are imported
only when a tokenizer is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.core.config.data import TOKENIZERS, TokenizerConfig
from megatron.core.config.data import Tokenizer as Tokenizer
from megatron.core.dist_checkpointing.file_storage import UrlPath, local_folder, located, storage_of


class NullTokenizer:
    """Tokenizer for text that consists of token ids: decimal numbers separated by spaces.

    The largest id, vocab_size - 1, is EOD. The text may contain any id except EOD.
    """

    bos = None

    def __init__(self, vocab_size: int) -> None:
        self.eod = self.eos = vocab_size - 1
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text. The method raises ValueError for a word that is not a token id."""
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} must be in 0..{self.vocab_size - 1}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(id)) for id in ids)

    def find(self, token: str) -> int | None:
        return int(token) if token.isdecimal() and int(token) < self.vocab_size else None


class ByteTokenizer:
    """Tokenizer whose tokens are the UTF-8 bytes 0 to 255, and EOD 256. The tokenizer encodes any text without loss and
    reads no file."""

    vocab_size = 257
    eod = eos = 256
    bos = None

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode token ids to text. Special tokens have no text. Invalid UTF-8 becomes replacement characters."""
        return bytes(id for id in ids if id < 256).decode("utf-8", "replace")

    def find(self, token: str) -> int | None:
        return token.encode()[0] if len(token.encode()) == 1 else None


def added_after(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer appends to each text, such as EOS."""
    around = getattr(tokenizer, "added_around", None)
    if around is not None:
        return list(around()[1])
    try:
        ids = list(tokenizer.tokenize("0"))
    except ValueError:
        return []
    return ids[-1:] if len(ids) > 1 and ids[-1] in (tokenizer.eos, tokenizer.eod) else []


def tokenize_beginning(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that will be continued. The ids that the tokenizer appends to each text are
    removed."""
    ids = list(tokenizer.tokenize(text))
    return ids[: len(ids) - len(added_after(tokenizer))]


def null(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    if vocab_size is None or vocab_size < 2:
        raise ValueError(
            "--tokenizer-type NullTokenizer: needs --vocab-size N, at least 2: the number of token ids. The last "
            "id ends a document"
        )
    return NullTokenizer(vocab_size)


def byte(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    return ByteTokenizer()


FILE_FIELDS = ("tokenizer_model", "vocab_file", "merge_file")

FILES = frozenset(
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt chat_template.jinja generation_config.json".split()
)
"""Names of files that a tokenizer may read in addition to the file in --tokenizer-model or another flag."""


def with_local_files(config: TokenizerConfig) -> TokenizerConfig:
    """Return the configuration with local copies in place of URLs. The function raises ValueError if a URL cannot be
    read."""
    found: dict[str, Any] = {}
    for field in FILE_FIELDS:
        path = located(getattr(config, field) or "")
        if isinstance(path, UrlPath):
            try:
                is_file = storage_of(path).size(path) is not None
                if is_file or storage_of(path).names(path):
                    beside = local_folder(path.parent if is_file else path, frozenset((path.name, *FILES)).__contains__)
                    found[field] = str(beside / path.name if is_file else beside)
            except OSError as error:
                raise ValueError(f"--{field.replace('_', '-')} {path}: cannot be read: {error}") from None
    return replace(config, **found)


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer of `--tokenizer-type`. The tokenizer is built only once per process for the same files.

    Only NullTokenizer uses `vocab_size` (--vocab-size). The function raises ValueError with the name of every flag or
    file that is missing.
    """
    if config.tokenizer_type is None:
        raise ValueError(
            f"--tokenizer-type must be given, because no checkpoint sets it: choose one of {', '.join(TOKENIZERS)}"
        )
    config = with_local_files(config)
    kind, problems = config.tokenizer_type, list[str]()
    assert kind is not None
    facts = TOKENIZERS.facts(kind)
    for field in facts.needs:
        flag, value = "--" + field.replace("_", "-"), getattr(config, field)
        if value is None:
            problems.append(f"--tokenizer-type {kind}: needs {flag} FILE")
        elif not facts.finds_files and not Path(value).exists():
            remedy = "correct the path" if Path(value).is_absolute() else f"the path is relative to {Path.cwd()}"
            problems.append(f"{flag} {value}: there is no such file; {remedy}")
    if problems:
        raise ValueError("\n".join(problems))
    model = config.tokenizer_model
    if model is not None and not Path(model).exists():  # not cached: later, the name may refer to other files
        return TOKENIZERS[kind](config, vocab_size)
    built = _built(config, tuple(_state_of_files(config)))
    if vocab_size not in built:
        tokenizer = TOKENIZERS[kind](config, vocab_size)
        built |= {vocab_size: tokenizer, tokenizer.vocab_size: tokenizer}
    return built[vocab_size]


@cache
def _built(config: TokenizerConfig, files: tuple[object, ...]) -> dict[int | None, Tokenizer]:
    """Return the cache of built tokenizers for these files, keyed by --vocab-size."""
    return {}


def _state_of_files(config: TokenizerConfig) -> Iterator[tuple[str, int, int]]:
    """Yield (path, modification time, size) for each file that the flags name. For a folder, also yield a tuple for
    each file in the folder. If no file changes between two calls, both calls yield the same tuples.
    """
    for value in vars(config).values():
        if isinstance(value, str) and (path := Path(value)).exists():
            for file in (path, *(path.iterdir() if path.is_dir() else ())):
                found = file.stat()
                yield str(file), found.st_mtime_ns, found.st_size
