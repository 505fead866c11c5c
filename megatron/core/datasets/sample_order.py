"""The order of samples: which sample of which data set each number stands for."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.sample_format import Sample


class SampleOrder(TextDataset):
    """Samples of other data sets under numbers of their own. A subclass says where each sample is (`place`); its
    inputs, its tokens, its origin and the pieces of documents that it consists of follow from that."""

    @abstractmethod
    def place(self, index: int) -> tuple[Dataset, int]:
        """(data set, number in it) of a sample."""

    def __getitem__(self, index: int) -> Sample:
        dataset, number = self.place(index)
        return dataset[number]

    def _text(self, index: int) -> NDArray[np.int64]:
        dataset, number = self.place(index)
        return dataset.text(number)

    def origin(self, index: int) -> str:
        dataset, number = self.place(index)
        return dataset.origin(number)

    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        return documents_of(*self.place(index))


def sources_of(dataset: Dataset, samples: range) -> NDArray[np.int64]:
    """[samples]: number of the source of each sample; 0 if a data set does not know it, or beyond its end."""
    found = np.zeros(len(samples), np.int64)
    if hasattr(dataset, "sources_of"):
        known = dataset.sources_of(samples)
        found[: len(known)] = known
    return found


def documents_of(dataset: Dataset, index: int) -> list[tuple[int, int, int]]:
    """`TextDataset.documents_of`; empty if a data set does not know it."""
    return list(dataset.documents_of(index)) if hasattr(dataset, "documents_of") else []
