"""Views of other data sets: sources numbered as in the run, and batches made full."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import Dataset, Sample


def sources_of(dataset: Dataset, samples: range) -> NDArray[np.int64]:
    """[samples]: number of the source of each sample; 0 where a data set does not tell, or beyond its end."""
    found = np.zeros(len(samples), np.int64)
    if hasattr(dataset, "sources_of"):
        known = dataset.sources_of(samples)
        found[: len(known)] = known
    return found


class Renumbered:
    """Another data set, whose source k has the number `numbers[k]` in the run. Samples beyond the data set, which fill
    a batch, count as the first source's."""

    def __init__(self, inner: Dataset, numbers: Sequence[int]) -> None:
        self.inner, self.numbers, self.fingerprint = inner, np.array(numbers, np.int64), inner.fingerprint

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Sample:
        return self.inner[index]

    def text(self, index: int) -> NDArray[np.int64]:
        return self.inner.text(index)

    def origin(self, index: int) -> str:
        return self.inner.origin(index)

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return self.numbers[sources_of(self.inner, samples)]


class WholeBatches:
    """The samples of another data set, and as many of no weight in the loss as make the last batch full."""

    def __init__(self, inner: Dataset, batch_size: int) -> None:
        self.inner, self.fingerprint = inner, inner.fingerprint
        self.batches = ceil(len(inner) / batch_size)
        self.samples = self.batches * batch_size

    def __len__(self) -> int:
        return self.samples

    def text(self, index: int) -> NDArray[np.int64]:
        return self.inner.text(index if index < len(self.inner) else 0)

    def origin(self, index: int) -> str:
        return self.inner.origin(index) if index < len(self.inner) else "none"

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return sources_of(self.inner, samples)

    def __getitem__(self, index: int) -> Sample:
        if index < len(self.inner):
            return self.inner[index]
        sample = dict(self.inner[0])
        loss_mask = sample["loss_mask"]
        assert loss_mask is not None
        return sample | {"loss_mask": np.zeros_like(loss_mask)}
