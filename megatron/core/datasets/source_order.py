"""The order in which a run takes the samples of each training source, over all phases and lengths of the run.

Megatron-LM's order of a source depends on how many samples are asked for: that number sets how many epochs are
shuffled together, and whether the last one is shuffled apart. A run that asks for more afterwards would begin another
order and repeat some samples and lose others. Here an order that has begun never changes. It is a list of segments:

- The first is Megatron-LM's order of as many samples as the run planned when it began.
- Where the segments end, another follows: further epochs, shuffled from a seed of their own.

An extension may give a source another order between two phases of a run (`Phase.take_up`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import DocumentSamples, GPTDataset, Pieces, SampleMaker, TextDataset
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.sample_order import SampleOrder


class SourceOrder:
    """One source: the segments of its order so far, and how many of their samples are taken."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range | Pieces,
        *,
        seed: int,
        split: str,
        cache: IndexCache,
        make: SampleMaker = GPTDataset,
    ) -> None:
        self.indexed = indexed
        self.make = make
        self.documents = documents
        self.seed = seed
        self.split = split
        self.cache = cache
        self.segments: list[DocumentSamples] = []
        self.taken = 0
        """Samples of the segments that are taken."""
        self._begun = 0

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        if isinstance(self.documents, Pieces):
            return self.documents.tokens
        return int(self.indexed.lengths[self.documents.start : self.documents.stop].sum(dtype=np.int64))

    def view(self, format: SampleFormat, planned: Sequence[int | None]) -> TextDataset:
        """The samples that come next, at least as many as the last of `planned` says, or (None) one epoch.

        `planned` are the numbers that were asked for in turn, as the plan of the run was made longer. Raises ValueError
        where a GPTDataset does."""
        for asked in planned:
            left = sum(map(len, self.segments)) - self.taken
            if asked is None and not self.segments:
                self.add(self.documents, None, format)
            elif asked is not None and asked > left:
                self.add(self.documents, asked - left, format)
        if not self.taken and len(self.segments) == 1:
            return self.segments[0]
        return _View(self.segments, self.taken)

    def take(self, samples: int) -> None:
        """Reports that this many samples of the view are consumed."""
        self.taken += samples

    def restart(self) -> None:
        """Begins a new order, as if no sample was taken."""
        self.segments, self.taken = [], 0

    def add(self, documents: range | Pieces, samples: int | None, format: SampleFormat) -> None:
        """Adds a segment of at least `samples` samples, or (None) one epoch."""
        seed = self.seed
        if self._begun:  # the first segment has the run's seed, as in Megatron-LM
            drawn = blake2b(f"{self.seed} {self._begun}".encode(), digest_size=4).digest()
            seed = int.from_bytes(drawn, "little")
        self._begun += 1
        made = self.make(self.indexed, documents, samples, format, seed=seed, split=self.split, cache=self.cache)
        self.segments.append(made)


class _View(SampleOrder):
    """The samples of segments from number `first` on."""

    def __init__(self, segments: Sequence[DocumentSamples], first: int) -> None:
        self.segments = list(segments)
        self.first = first
        self.format = segments[0].format
        self.ends = np.cumsum([len(segment) for segment in segments])
        self.samples = int(self.ends[-1]) - first
        # Segments that are added later change no sample.
        self.fingerprint = segments[0].fingerprint
        if first:
            self.fingerprint = content_hash({"segment": self.fingerprint, "first": first})

    def place(self, index: int) -> tuple[DocumentSamples, int]:
        number = int(np.searchsorted(self.ends, index + self.first, side="right"))
        before = int(self.ends[number - 1]) if number else 0
        return self.segments[number], index + self.first - before


def split_tokens(lengths: NDArray, shares: Sequence[float], wanted: Sequence[bool], block: int) -> list[Pieces] | None:
    """Divides the tokens of all documents, one after another, by `shares`. A split that is `wanted` gets at least
    `block` tokens, at the cost of the largest; None if there are too few."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1])
    sizes = [round(share * total) for share in shares]
    sizes = [max(size, block) if want else size for size, want in zip(sizes, wanted, strict=True)]
    largest = max(range(len(sizes)), key=lambda number: sizes[number])
    sizes[largest] += total - sum(sizes)
    if sizes[largest] < (block if wanted[largest] else 0):
        return None
    begins = np.append(0, ends[:-1])
    parts = []
    first = 0
    for size in sizes:
        starts, stops = np.maximum(begins, first), np.minimum(ends, first + size)
        some = np.flatnonzero(stops > starts)
        digest = content_hash({"tokens": [first, first + size]})
        parts.append(Pieces(some, starts[some] - begins[some], stops[some] - starts[some], digest))
        first += size
    return parts
