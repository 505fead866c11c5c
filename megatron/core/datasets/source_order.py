"""Sample order of each training source over all phases and extensions of a run.

Megatron-LM's order of a source depends on the requested number of samples, which determines how many epochs are
shuffled together and whether the last epoch is shuffled separately. If a run with Megatron-LM's order were extended,
the new order would repeat some samples and skip others. A `SourceOrder`, in contrast to Megatron-LM's order, never
changes the order of samples that it has already planned. An order is a list of segments:

- The first segment is the order that Megatron-LM uses if the run requests the number of samples planned at its start.
- Each further segment consists of further epochs, shuffled with another seed.

When a run begins a new data phase, an extension may change the order in which samples are read (`Phase.take_up`).
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
    """Sample order of one training source: the segments so far, and the number of samples consumed from the source."""

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
        """Create a sample order that has no segments yet.

        Args:
            indexed: Dataset of the documents.
            documents: Documents of the split, or pieces of documents.
            seed: Seed of the first segment.
            split: Name of the split, for messages.
            cache: Cache for the index files.
            make: Function that makes the samples of a segment.
        """
        self.indexed = indexed
        self.make = make
        self.documents = documents
        self.seed = seed
        self.split = split
        self.cache = cache
        self.segments: list[DocumentSamples] = []
        self.taken = 0
        """Number of samples consumed so far, counted from the start of the first segment."""
        self._begun = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in an epoch."""
        if isinstance(self.documents, Pieces):
            return self.documents.tokens
        return int(self.indexed.lengths[self.documents.start : self.documents.stop].sum(dtype=np.int64))

    def view(self, format: SampleFormat, planned: Sequence[int | None]) -> TextDataset:
        """Return a dataset of the samples that follow the consumed samples. The dataset contains at least as many
        samples as the last number in `planned`, or one epoch if the last number is None.

        `planned` lists the sample counts that were requested so far: first the original count, then one count for each
        extension. The method raises ValueError under the same conditions as `GPTDataset`.
        """
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
        """Add `samples` to the number of consumed samples."""
        self.taken += samples

    def restart(self) -> None:
        """Discard all segments, and reset the number of consumed samples to 0."""
        self.segments, self.taken = [], 0

    def add(self, documents: range | Pieces, samples: int | None, format: SampleFormat) -> None:
        """Add a segment of at least `samples` samples, or of one epoch if `samples` is None."""
        seed = self.seed
        if self._begun:  # only the first segment uses the seed of the run, as in Megatron-LM
            drawn = blake2b(f"{self.seed} {self._begun}".encode(), digest_size=4).digest()
            seed = int.from_bytes(drawn, "little")
        self._begun += 1
        made = self.make(self.indexed, documents, samples, format, seed=seed, split=self.split, cache=self.cache)
        self.segments.append(made)


class _View(SampleOrder):
    """Dataset that contains the samples of consecutive segments, starting at sample number `first`."""

    def __init__(self, segments: Sequence[DocumentSamples], first: int) -> None:
        self.segments = list(segments)
        self.first = first
        self.format = segments[0].format
        self.ends = np.cumsum([len(segment) for segment in segments])
        self.samples = int(self.ends[-1]) - first
        # The first segment identifies the dataset, because segments that are added later do not change existing
        # samples.
        self.fingerprint = segments[0].fingerprint
        if first:
            self.fingerprint = content_hash({"segment": self.fingerprint, "first": first})

    def place(self, index: int) -> tuple[DocumentSamples, int]:
        number = int(np.searchsorted(self.ends, index + self.first, side="right"))
        before = int(self.ends[number - 1]) if number else 0
        return self.segments[number], index + self.first - before


def split_tokens(lengths: NDArray, shares: Sequence[float], wanted: Sequence[bool], block: int) -> list[Pieces] | None:
    """Split the concatenated tokens of all documents into consecutive parts in proportion to `shares`.

    Args:
        lengths: Number of tokens in each document.
        shares: Share of each split.
        wanted: Whether each split must contain at least `block` tokens. A split with fewer tokens takes the missing
            tokens from the largest split.
        block: Minimum number of tokens of each split for which `wanted` is True.

    Returns:
        The pieces of each split, or None if there are too few tokens.
    """
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
