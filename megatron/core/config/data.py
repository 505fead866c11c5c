"""Frozen dataclasses that configure the training data and the tokenizer. See `megatron.core.config`.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.core.config.attention import OF_TABLES
from megatron.core.config.flag_spec import Condition, Section, flag
from megatron.core.datasets.dataset import DATASETS
from megatron.core.registry import Registry

END_OF_DOCUMENT = Condition(
    "the end-of-document token of the tokenizer; add --tokenizer-type",
    lambda config: config.tokenizer.tokenizer_type is not None,
)


class Tokenizer(Protocol):
    """Tokenizer, which converts text to token ids and back. The id of a missing special token is None."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one, including special tokens, but without padding of the vocabulary."""

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token."""

    @property
    def bos(self) -> int | None:
        """Id of the beginning-of-sequence token."""

    @property
    def eos(self) -> int | None:
        """Id of the end-of-sequence token."""

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def find(self, token: str) -> int | None:
        """Return the id of a token, such as "<fim_prefix>"; None if the vocabulary does not contain it."""


class TokenizerBuilder(Protocol):
    """Function that builds a tokenizer, registered under a value of --tokenizer-type. `vocab_size` is the value of
    --vocab-size. If the value of a flag is invalid, the function raises a ValueError that names the flag."""

    def __call__(self, config: TokenizerConfig, vocab_size: int | None) -> Tokenizer: ...


@dataclass(frozen=True)
class TokenizerFacts:
    needs: tuple[str, ...] = ()
    """Fields of `TokenizerConfig` that must be set to the path of a file."""

    finds_files: bool = False
    """True if --tokenizer-model may also be a name instead of a path. The tokenizer then finds its files by this
    name."""


TOKENIZERS = Registry("--tokenizer-type", TokenizerFacts, protocol=TokenizerBuilder)
"""Registry that maps each choice of --tokenizer-type to a `TokenizerBuilder`. Extensions register builders as follows:

    @TOKENIZERS.register("Words")
    def words(config: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
        return Words(config.vocab_file)
"""

TOKENIZERS.register("NullTokenizer", "megatron.core.tokenizers:null")
TOKENIZERS.register("ByteTokenizer", "megatron.core.tokenizers:byte")


@dataclass(frozen=True)
class DatasetConfig(Section):
    """Training data and sample format."""

    data_path: tuple[str, ...] | None = flag(None, many=True, path="url", first_run=True)
    """Training data: the prefix of an indexed dataset, a text file, a folder or a URL. For a blend, give several of
    them, each after its weight. --split divides the data into training, validation and test sets."""

    train_data_path: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --data-path, but only for training. PREFIX@0:0.9 is the first 90 % of the documents."""

    valid_data_path: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --data-path, for validation only."""

    test_data_path: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --data-path, for the test set only."""

    valid: tuple[str, ...] | None = flag(None, repeats=True, path="url", needs="--eval-iters above 0; raise it")
    """NAME=PREFIX adds a validation set, whose loss is logged as NAME. This flag may be given more than once."""

    multiple_validation_sets: bool = False
    """Evaluate each prefix of --valid-data-path separately, under the name of the prefix without its folders."""

    split: str = flag("969,30,1", first_run=True)
    """Shares of documents for training, validation and test."""

    data_cache_path: str | None = flag(None, path="local", writes="folder")
    """Folder for index files and for tokens of text files; default: cache/ next to the data."""

    mock_data: bool = flag(False, first_run=True)
    """Train on synthetic tokens, which need no files."""

    dataset_type: str | None = flag(None, choices=DATASETS, excludes="--mock-data")
    """Source of the training data; default: gpt, indexed datasets in files, or mock under --mock-data."""

    num_workers: int = flag(2, at_least=0)
    """Threads per rank that prefetch samples; 0 prepares samples on demand."""

    eod_mask_loss: bool = flag(False, needs=END_OF_DOCUMENT)
    """Exclude end-of-document tokens from the loss."""

    reset_position_ids: bool = flag(False, no_effect_without=OF_TABLES, needs=END_OF_DOCUMENT)
    """Restart the positions of a learned or sinusoidal position embedding after each end of document."""

    reset_attention_mask: bool = flag(False, needs=END_OF_DOCUMENT)
    """Restrict each token's attention to its own document."""

    @property
    def dataset(self) -> str:
        """Effective value of --dataset-type."""
        return self.dataset_type or ("mock" if self.mock_data else "gpt")

    @property
    def per_split(self) -> bool:
        """True if training, validation and test data have separate paths."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

    @property
    def named_sets(self) -> dict[str, str]:
        """Return the dataset prefix of each named validation set, keyed by the name of the set. The property raises
        ValueError if a name is not valid or occurs twice."""
        found: dict[str, str] = {}
        given = [("--valid", word, *word.partition("=")[::2]) for word in self.valid or ()]
        if self.multiple_validation_sets:
            prefixes = [word for word in self.valid_data_path or () if weight_of(word) is None]
            given += [
                ("--valid-data-path", word, word.rstrip("/").rpartition("/")[2].partition(".")[0], word)
                for word in prefixes
            ]
        for flag_name, word, name, prefix in given:
            if not prefix or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(
                    f"{flag_name} {word}: must be NAME=PREFIX, with letters, digits, dots and dashes in NAME"
                )
            if name in found:
                raise ValueError(f"{flag_name} {word}: a validation set {name} already exists; choose another name")
            found[name] = prefix
        return found


def weight_of(word: str) -> float | None:
    """Parse an entry of a data list. Return the number if the entry is a weight, and None if it is a path."""
    try:
        return float(word)
    except ValueError:
        return None


@dataclass(frozen=True)
class TokenizerConfig(Section):
    """Tokenizer."""

    tokenizer_type: str | None = flag(None, choices=TOKENIZERS, first_run=True)
    """Type of the tokenizer; default: GPT2BPETokenizer if its files are given, else none."""

    tokenizer_model: str | None = flag(None, path="stored", first_run=True)
    """SentencePiece model file, tokenizer.json file, folder that contains a tokenizer.json file, or name of a tokenizer
    in the local Hugging Face cache. Files and folders may be URLs of a registered storage."""

    vocab_file: str | None = flag(None, path="stored")
    """GPT-2 BPE vocab.json."""

    merge_file: str | None = flag(None, path="stored")
    """GPT-2 BPE merges.txt."""
