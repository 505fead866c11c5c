"""Initialization of embedding rows for new tokens. A run that starts from a Hugging Face folder may have a larger
vocabulary than the folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import LocalBox
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.interop.conversion.formats import tokenizer_config
from megatron.extensions.interop.hugging_face.layouts import VocabularyRows
from megatron.extensions.interop.hugging_face.weights import HFWeights

ROWS = 256
"""Number of embedding rows that are read at a time to compute their mean."""


@dataclass(frozen=True)
class NewTokens:
    """Initializer of the embedding rows for tokens that a run adds to the vocabulary of a Hugging Face folder. The ids
    of the added tokens range from the folder's `vocab_size` to `tokens` - 1."""

    weights: HFWeights
    """Weights of the folder, with the folder's vocabulary size."""

    tokens: int
    averaged: int
    """Number of embedding rows in the folder whose mean initializes the new rows. The mean is taken over the first
    `averaged` rows."""

    drawn: bool
    """True if new rows are initialized randomly, as in a new model. False if new rows are set to the mean of the
    folder's rows."""

    _means: dict[str, Tensor] = field(default_factory=dict)

    def concerns(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return True if a parameter or untrained buffer has one row per vocabulary token along dim 0. `shape` is the
        shape of the parameter or buffer in the run."""
        placement = self.weights.placements[name]
        return isinstance(placement.layout, VocabularyRows) or placement.meta.global_shape != shape

    def fill(self, name: str, box: LocalBox) -> None:
        """Fill this rank's slice of a parameter that has one row per vocabulary token along dim 0. Along dim 0, the
        parameter consists of the folder's rows, then the rows of new tokens, and then zeros as padding.

        With random initialization, new rows keep the values that they received when the model was built. New rows of an
        integer table are always initialized randomly, because integer rows have no mean.
        """
        (first, *columns), data = box
        others = tuple(slice(start, start + size) for start, size in zip(columns, data.shape[1:], strict=True))
        theirs = self._within(self.weights.config.vocab_size or 0, box)
        ours = self._within(self.tokens, box)
        if theirs:
            data[:theirs].copy_(self.weights.read(name, (slice(first, first + theirs), *others), data.dtype))
        if ours > theirs and not self.drawn and data.is_floating_point():
            data[theirs:ours].copy_(self.mean(name)[others])
        data[ours:].zero_()

    @staticmethod
    def _within(tokens: int, box: LocalBox) -> int:
        """Return how many rows of this rank's slice `box` belong to the first `tokens` rows of the vocabulary."""
        return min(max(tokens - box[0][0], 0), len(box[1]))

    def mean(self, name: str) -> Tensor:
        """Return the mean [...] of the first `averaged` rows of a parameter [V, ...], computed in fp64 and rounded to
        fp32.

        Rows are added in a fixed order, so that all ranks compute bitwise equal means regardless of the number of
        threads.
        """
        if name not in self._means:
            whole = [slice(0, size) for size in self.weights.placements[name].meta.global_shape[1:]]
            total: Tensor | None = None
            for start in range(0, self.averaged, ROWS):
                rows = slice(start, min(start + ROWS, self.averaged))
                part = _sum_of_rows(self.weights.read(name, (rows, *whole), torch.float64))
                total = part if total is None else total + part
            assert total is not None
            exact = torch.float64 in self.weights.dtypes(name)
            self._means[name] = (total / self.averaged).to(torch.float64 if exact else torch.float32)
        return self._means[name]

    def described(self, source: str) -> str:
        """Return the log line that reports how the embedding rows of new tokens were initialized. `source` describes
        the rows from which the mean is computed."""
        old, new = self.weights.config.vocab_size or 0, self.tokens
        how = "drawn as in a new model" if self.drawn else f"set to the mean of {self.averaged} rows, {source}"
        line = f" {new - old} new token{'s' * (new - old > 1)} (from id {old}): rows {how}"
        if not self.drawn and self.averaged < old:
            line += f"; rows {self.averaged} to {old - 1} are padding in the folder and keep the folder's values"
        return line


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Return the sum [...] of all rows [n, ...]. Pairs of rows are added in a fixed order, so that the result is
    deterministic."""
    while len(rows) > 1:
        half = len(rows) // 2
        pairs = rows[:half] + rows[half : 2 * half]
        rows = torch.cat((pairs, rows[2 * half :]))
    return rows[0]


def rows_of_tokens(path: Path, vocab_size: int) -> tuple[int, str]:
    """Return how many embedding rows of a folder belong to tokens, and a description of these rows. The folder's
    remaining embedding rows are padding.

    `vocab_size` is the number of rows in the folder. If the folder contains a readable tokenizer, the number of
    returned rows is the tokenizer's vocabulary size, but at most `vocab_size`. If there is no readable tokenizer, all
    rows are assumed to belong to tokens.
    """
    named = tokenizer_config(path)
    if named.tokenizer_type is None:
        return vocab_size, "all rows of the folder, which has no tokenizer"
    try:
        tokens = build_tokenizer(named).vocab_size
    except (ValueError, OSError):
        return vocab_size, "all rows of the folder, whose tokenizer cannot be read"
    return min(tokens, vocab_size), "the tokens of the folder's tokenizer"


def refused_vocabulary(load: str, theirs: int, ours: int) -> str:
    """Return the error message for a run whose vocabulary (`ours` tokens) is smaller than the folder's vocabulary
    (`theirs` tokens)."""
    return (
        f"--load {load} has a vocabulary of {theirs} tokens, but the run's has {ours}, so rows of trained tokens "
        f"would be lost: give --vocab-size {theirs} or more, or a tokenizer that fits the model"
    )
