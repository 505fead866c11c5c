"""Base class for reordering samples of other datasets."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.sample_format import Sample


class SampleOrder(TextDataset):
    """Base class of datasets that return the samples of other datasets in a different order.

    Subclasses implement `place`, which determines the inputs, tokens, origin and document pieces of a sample.
    """

    @abstractmethod
    def place(self, index: int) -> tuple[Dataset, int]:
        """Return the dataset that contains a sample, and the number of the sample in that dataset."""

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
    """Return the source number of each sample in the range `samples`. A source number is 0 if the source is unknown, or
    if the sample is beyond the end of the dataset."""
    found = np.zeros(len(samples), np.int64)
    if hasattr(dataset, "sources_of"):
        known = dataset.sources_of(samples)
        found[: len(known)] = known
    return found


def documents_of(dataset: Dataset, index: int) -> list[tuple[int, int, int]]:
    """Return the parts of documents that a sample contains (see `TextDataset.documents_of`), or an empty list if the
    dataset does not record these parts."""
    return list(dataset.documents_of(index)) if hasattr(dataset, "documents_of") else []
