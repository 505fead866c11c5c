"""A data set whose every sample is evaluated once, in batches that must be full."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import Dataset, Sample
from megatron.core.datasets.staged import sources_of


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
