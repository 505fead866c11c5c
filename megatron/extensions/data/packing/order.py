"""Computation of packed samples from the seed and the document lengths. This module depends only on numpy and does not
read files.

Documents are shuffled in each epoch and divided into windows of equal size. Best-fit decreasing packs the documents of
a window into bins, which are shuffled and become samples. A document with more tokens than a sample is divided into
full samples, and only the remainder is packed. Adjacent parts of a document share one token, as in Megatron-LM's
samples: the last label of one part is the first input of the next part. Every token except the first token of a
document is therefore predicted once per epoch. A document of a single token has no predictions and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.extensions.data.packing.bins import best_fit_decreasing

FEWEST_BINS = 16
"""Minimum number of samples that the documents of one window should fill. If a data set has too few tokens for this
number of samples, its documents are repeated within a window."""


class Packed(NamedTuple):
    """Packed samples, as lists of document parts."""

    ends: NDArray[np.int64]
    """Cumulative number of document parts, up to and including each sample, [samples]."""

    documents: NDArray[np.int64]
    """Document number of each document part, [parts]. Document parts are sorted by sample, then by position in the
    sample."""

    starts: NDArray[np.int64]
    """Position in the document at which each document part begins, [parts]."""

    lengths: NDArray[np.int64]
    """Number of tokens in each document part, [parts]."""

    @classmethod
    def joined(cls, parts: list[Packed]) -> Packed:
        """Concatenate several `Packed` objects, for example one object per window."""
        before = np.cumsum([0, *(len(part.documents) for part in parts)])
        ends = [part.ends + first for part, first in zip(parts, before, strict=False)]
        fields = zip(*(part[1:] for part in parts), strict=True)
        return cls(np.concatenate(ends), *(np.concatenate(arrays) for arrays in fields))


@dataclass(frozen=True)
class Rounds:
    """Division of a run into rounds of one or more epochs, and of each round into windows. The documents of a window
    are packed together."""

    documents: range
    epochs: int
    """Number of epochs per round. This number is larger than 1 for small data sets. The first round always has one
    epoch."""

    windows: int
    """Number of windows of documents into which each round is divided."""

    @classmethod
    def of(cls, lengths: NDArray, documents: range, seq_length: int, window: int) -> Rounds:
        """Choose the number of epochs and windows per round for a data set.

        Args:
            lengths: Lengths of all documents of the data set.
            documents: Range of document numbers to use.
            seq_length: Number of input tokens per sample. The label of the last token is not counted.
            window: Maximum number of documents per window.
        """
        tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
        epochs = -(-FEWEST_BINS * (seq_length + 1) // max(tokens, 1))
        return cls(documents, max(1, epochs), 1 if epochs > 1 else -(-len(documents) // window))


def round_of(lengths: NDArray, rounds: Rounds, seq_length: int, seed: int, number: int) -> Packed:
    """Return the samples of one round.

    Args:
        lengths: Lengths of all documents of the data set.
        rounds: Documents to use, and the division of the run into rounds.
        seq_length: Number of input tokens per sample. The label of the last token is not counted.
        seed: Seed of the sample order.
        number: Number of the round, starting at 0.
    """
    digest = blake2b(f"packing {seed} {number}".encode(), digest_size=4).digest()
    random = np.random.RandomState(int.from_bytes(digest, "little"))
    epochs = rounds.epochs if number else 1
    order = [random.permutation(len(rounds.documents)) + rounds.documents.start for _ in range(epochs)]
    windows = np.array_split(np.concatenate(order), rounds.windows)
    return Packed.joined([_window(lengths, window.astype(np.int64), seq_length, random) for window in windows])


def _window(lengths: NDArray, documents: NDArray, seq_length: int, random: np.random.RandomState) -> Packed:
    """Pack the documents of a window and shuffle the samples."""
    documents, starts, sizes = cut(documents, lengths[documents].astype(np.int64), seq_length)
    bins = best_fit_decreasing(sizes, seq_length + 1)
    count = int(bins.max()) + 1 if len(bins) else 0
    drawn = random.permutation(count)[bins]
    order = np.argsort(drawn, kind="stable")
    ends = np.cumsum(np.bincount(drawn, minlength=count))
    return Packed(ends, documents[order], starts[order], sizes[order])


def cut(
    documents: NDArray[np.int64], lengths: NDArray[np.int64], seq_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Divide documents into parts of at most seq_length + 1 tokens. Return three arrays with one element per part: the
    document number, the position of the first token in the document, and the length. Documents with at most seq_length
    + 1 tokens are not divided."""
    # A document of n tokens has n - 1 predictions, and a sample has `seq_length` predictions.
    parts = np.maximum(0, -(-(lengths - 1) // seq_length))
    firsts = np.repeat(np.cumsum(parts) - parts, parts)
    starts = (np.arange(int(parts.sum())) - firsts) * seq_length
    sizes = np.minimum(np.repeat(lengths, parts) - starts, seq_length + 1)
    return np.repeat(documents, parts), starts, sizes


@dataclass(frozen=True)
class Waste:
    """Statistics about how well documents fill samples."""

    samples: int
    places: int
    """Total number of tokens in all samples, including padding. Each sample has seq_length + 1 tokens."""

    padding: int
    """Number of padding tokens in all samples."""

    documents: int
    cut: int
    """Number of documents that are divided among several samples."""

    @classmethod
    def of(cls, packed: Packed, seq_length: int) -> Waste:
        places = len(packed.ends) * (seq_length + 1)
        first = packed.starts == 0
        documents = int(np.count_nonzero(first))
        longer = np.unique(packed.documents[~first])
        return cls(
            len(packed.ends),
            places,
            places - int(packed.lengths.sum()),
            documents,
            int(np.count_nonzero(np.isin(packed.documents[first], longer))),
        )

    def __str__(self) -> str:
        return (
            f"{100 * self.padding / max(self.places, 1):.3g} % padding, {self.cut:,} of {self.documents:,} documents "
            "cut because they are longer than a sample"
        )


def blocks() -> Iterator[range]:
    """Yield ranges of round numbers: 0, 1, 2-3, 4-7, ... The rounds of each range ("block") are cached together. The
    number of rounds per block doubles, so that a run with many rounds still has few blocks."""
    yield range(1)
    first = 1
    while True:
        yield range(first, 2 * first)
        first *= 2
