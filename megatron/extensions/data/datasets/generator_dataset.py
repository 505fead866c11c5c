"""Data set that reads samples from a Python generator, without files or an index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.build import SIZE_FLAGS
from megatron.core.datasets.dataset import Datasets
from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.index_cache import content_hash
from megatron.core.datasets.mock import SPLITS
from megatron.core.datasets.sample_format import SampleFormat

WINDOW = 1024
"""Maximum number of samples in memory that were read from the stream but not requested yet. Samples that precede a
requested sample in the stream are kept, because another thread may request them later."""

Stream = Callable[[int], Iterator[Sequence[int] | NDArray]]
"""Function `stream(first)` that returns an iterator over the samples of a stream, starting with sample number `first`.
Each sample has seq_length + 1 token ids. All calls with the same `first` must yield the same samples."""


class GeneratorDataset(TextDataset):
    """Data set with random access to the first `samples` samples of a stream. A run can therefore resume at any sample,
    even with a different number of ranks.

    The stream is read sequentially. Every data-parallel rank reads the whole stream and keeps only its own samples. If
    a requested sample is not in memory, and lies before the current position or at least `WINDOW` samples after it, the
    stream is restarted at this sample. `fingerprint` is a string that identifies the stream. Different streams need
    different fingerprints."""

    def __init__(self, stream: Stream, samples: int, format: SampleFormat, fingerprint: str) -> None:
        self.stream = stream
        self.samples = samples
        self.format = format
        self.fingerprint = content_hash({"stream": fingerprint, "sequence_length": format.seq_length})
        self._lock = Lock()
        self._reader: Iterator[Sequence[int] | NDArray] | None = None
        self._next = 0
        self._ahead: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def origin(self, index: int) -> str:
        return f"stream:{index}+0"

    def _text(self, index: int) -> NDArray[np.int64]:
        """Return the token ids of a sample. Raises ValueError if the stream ends before this sample, yields a sample of
        the wrong length, or yields token ids outside the vocabulary."""
        with self._lock:
            if index in self._ahead:
                return self._ahead.pop(index)
            if self._reader is None or not self._next <= index < self._next + WINDOW:
                self._reader, self._next = iter(self.stream(index)), index
                self._ahead.clear()
            while True:
                number, text = self._next, self._read()
                if number == index:
                    return text
                self._ahead[number] = text
                if len(self._ahead) > WINDOW:
                    self._ahead.popitem(last=False)

    def _read(self) -> NDArray[np.int64]:
        assert self._reader is not None
        try:
            text = np.asarray(next(self._reader), np.int64)
        except StopIteration:
            raise ValueError(f"the stream of data ended at sample {self._next} of {self.samples}") from None
        if text.shape != (self.format.seq_length + 1,):
            raise ValueError(
                f"sample {self._next} of the stream has shape {text.shape}, but must be --seq-length + 1 = "
                f"{self.format.seq_length + 1} token ids"
            )
        self.format.check_ids(text, f"sample {self._next} of the stream")
        self._next += 1
        return text


def stream_splits(
    stream: Callable[[str, int], Iterator[Sequence[int] | NDArray]],
    format: SampleFormat,
    sizes: Sequence[int | None],
    fingerprint: str,
) -> Datasets:
    """Return data sets that read the splits of a run from a stream. A dataset function that is registered in `DATASETS`
    can return this result.

    Raises ValueError if `sizes` does not state the length of a split. A stream has no epochs from which the length
    could be derived.

    Args:
        stream: Function (split, first) that returns an iterator over the samples of a split, starting with sample
            number `first`. The split is "train", "valid" or "test".
        format: Format of the samples.
        sizes: Number of samples of each split; 0 for a split that is not used.
        fingerprint: String that identifies the stream. Different streams need different strings.
    """
    found: list[GeneratorDataset | None] = []
    for split, size in zip(SPLITS, sizes, strict=True):
        if size is None:
            raise ValueError(f"a stream of data has no epochs; set the length of the run with {SIZE_FLAGS[split]}")
        whole = GeneratorDataset(partial(stream, split), size, format, f"{fingerprint} {split}") if size else None
        found.append(whole)
    return Datasets(*found)
