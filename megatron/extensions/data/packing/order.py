"""Samples of packed documents, as a function of the seed and the lengths of the documents. Uses numpy only, and no
files.

Documents are shuffled in each epoch and divided into windows of equal size. Best-fit decreasing packs the documents of
a window into bins, which are shuffled and become samples. A document with more tokens than a sample is divided into
full samples, and only the remainder is packed. Adjacent parts of a document share one token, as in Megatron-LM's
samples: it is the last label of one part and the first input of the next, so that every token except a document's first
is predicted once per epoch. A document of a single token predicts nothing and is left out.
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
"""Smallest number of full samples that the documents packed together should fill. Small data sets are repeated to reach
it."""


class Packed(NamedTuple):
    """Samples, and the parts of documents in them."""

    ends: NDArray[np.int64]
    """[samples]: number of parts in all samples up to and including this one."""

    documents: NDArray[np.int64]
    """[parts]: document of each part, sample by sample, in the order of the parts in the sample."""

    starts: NDArray[np.int64]
    """[parts]: position of the part's first token in the document."""

    lengths: NDArray[np.int64]
    """[parts]: number of tokens of the part."""

    @classmethod
    def joined(cls, parts: list[Packed]) -> Packed:
        """Concatenate the samples of several orders."""
        before = np.cumsum([0, *(len(part.documents) for part in parts)])
        ends = [part.ends + first for part, first in zip(parts, before, strict=False)]
        fields = zip(*(part[1:] for part in parts), strict=True)
        return cls(np.concatenate(ends), *(np.concatenate(arrays) for arrays in fields))


@dataclass(frozen=True)
class Rounds:
    """Rounds in which the documents of a data set are used; each round is divided into windows."""

    documents: range
    epochs: int
    """Epochs in each round after the first, which is one epoch: more than one if the data set is small."""

    windows: int
    """Windows of a round."""

    @classmethod
    def of(cls, lengths: NDArray, documents: range, seq_length: int, window: int) -> Rounds:
        """Rounds of `documents` of a data set, in windows of at most `window` documents."""
        tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
        epochs = -(-FEWEST_BINS * (seq_length + 1) // max(tokens, 1))
        return cls(documents, max(1, epochs), 1 if epochs > 1 else -(-len(documents) // window))


def round_of(lengths: NDArray, rounds: Rounds, seq_length: int, seed: int, number: int) -> Packed:
    """Return the samples of round `number`. `lengths` are those of the whole data set; `rounds` refers to a part of
    it."""
    digest = blake2b(f"packing {seed} {number}".encode(), digest_size=4).digest()
    random = np.random.RandomState(int.from_bytes(digest, "little"))
    epochs = rounds.epochs if number else 1
    order = [random.permutation(len(rounds.documents)) + rounds.documents.start for _ in range(epochs)]
    windows = np.array_split(np.concatenate(order), rounds.windows)
    return Packed.joined([_window(lengths, window.astype(np.int64), seq_length, random) for window in windows])


def _window(lengths: NDArray, documents: NDArray, seq_length: int, random: np.random.RandomState) -> Packed:
    """Pack some documents and shuffle the samples."""
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
    """(document, first token, tokens) of the parts of documents, each of at most seq_length + 1 tokens. Only documents
    that are longer are divided."""
    parts = np.maximum(0, -(-(lengths - 1) // seq_length))  # a document of n tokens has n - 1 predictions
    firsts = np.repeat(np.cumsum(parts) - parts, parts)
    starts = (np.arange(int(parts.sum())) - firsts) * seq_length
    sizes = np.minimum(np.repeat(lengths, parts) - starts, seq_length + 1)
    return np.repeat(documents, parts), starts, sizes


@dataclass(frozen=True)
class Waste:
    """Statistics about how well documents fill samples."""

    samples: int
    places: int
    """Number of tokens of all samples, seq_length + 1 each."""

    padding: int
    """Number of padded positions."""

    documents: int
    cut: int
    """Number of documents that are divided between samples."""

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
    """Cache of rounds, which are made in blocks: 0, 1, 2-3, 4-7, ... A run needs few blocks, however many rounds it
    has."""
    yield range(1)
    first = 1
    while True:
        yield range(first, 2 * first)
        first *= 2
