"""Which samples of a step each micro-batch of each data-parallel replica has. No torch."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset


class Dealer(Protocol):
    """Deals the samples of a step to the micro-batches of all replicas: a pure function, the same on every rank."""

    def __call__(self, dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
        """[micro-batches, replicas, micro_batch_size]: the numbers of `samples`, each once."""


def in_order(dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Micro-batch after micro-batch, replica after replica, as Megatron-LM deals them."""
    return np.arange(samples.start, samples.stop).reshape(-1, replicas, micro_batch_size)


@runtime_checkable
class DealsSamples(Protocol):
    """Flags of an extension that may deal the samples of training steps in another way."""

    def dealer(self, seq_length: int) -> Dealer | None:
        """What deals samples of this length; None if the flags do not ask for it."""
