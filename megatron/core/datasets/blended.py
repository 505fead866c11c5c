"""Datasets that blend several datasets by weight or in proportion to their sizes, and views that renumber the sources
of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.indices import BlendIndex, build_blend_index, build_exhaustive_blend_index
from megatron.core.datasets.sample_format import Sample
from megatron.core.datasets.sample_order import SampleOrder, sources_of

MAX_DATASETS = 2**15 - 1


def normalise(weights: Sequence[float]) -> list[float]:
    """Divide the weights by their sum. The results are rounded in the same way as in Megatron-LM."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


class BlendedDataset(SampleOrder):
    """Dataset of `size` samples that are drawn from several datasets in proportion to `weights`. Every sample is drawn
    from the dataset that is currently furthest below its share. If `size` is None, the weights are the lengths of the
    datasets, and every sample appears once.
    """

    def __init__(
        self, datasets: Sequence[TextDataset], weights: Sequence[float], size: int | None, cache: IndexCache
    ) -> None:
        """Create a blend.

        Args:
            datasets: Datasets to draw from.
            weights: One weight per dataset; ignored if `size` is None.
            size: Number of samples, or None to use every sample once.
            cache: Cache in which the order of the blend's samples is stored.
        """
        assert len(datasets) == len(weights) and min(weights) > 0
        if len(datasets) > MAX_DATASETS:
            raise ValueError(f"a blend has {len(datasets)} datasets; the limit is {MAX_DATASETS}: merge some of them")
        self.datasets, self.format = list(datasets), datasets[0].format
        lengths = [len(dataset) for dataset in datasets]
        if size is None:
            self.weights: list[float] | None = None
            rule: dict[str, object] = {"sizes": lengths}
            parts = cache.arrays(
                BlendIndex._fields, "BlendedDataset", rule, lambda: build_exhaustive_blend_index(lengths)
            )
        else:
            shares = self.weights = normalise(weights)
            rule = {"weights": shares, "size": size}
            parts = cache.arrays(BlendIndex._fields, "BlendedDataset", rule, lambda: build_blend_index(shares, size))
        self.index = BlendIndex(*parts)
        self.samples = len(self.index.dataset)
        self._check_counts(lengths)
        # A longer run with the same weights begins with the same draws, so the fingerprint does not contain the size.
        order = {"weights": self.weights, "sizes": None if self.weights else lengths}
        self.fingerprint = content_hash({**order, "datasets": [dataset.fingerprint for dataset in datasets]})

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return self.index.dataset[samples.start : samples.stop].astype(np.int64)

    def place(self, index: int) -> tuple[TextDataset, int]:
        return self.datasets[int(self.index.dataset[index])], int(self.index.sample[index])

    def _check_counts(self, lengths: Sequence[int]) -> None:
        counts = np.bincount(self.index.dataset, minlength=len(lengths))
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if count > length:
                raise ValueError(f"the blend draws {count} samples from dataset {number}, which has {length}")


class _SameNumbers(SampleOrder):
    """Base class of datasets that wrap another dataset and keep its sample numbers. Subclasses change some other
    properties of the wrapped dataset."""

    def __init__(self, inner: Dataset) -> None:
        self.inner, self.fingerprint = inner, inner.fingerprint
        self.samples = len(inner)

    def place(self, index: int) -> tuple[Dataset, int]:
        return self.inner, index

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return sources_of(self.inner, samples)


class Renumbered(_SameNumbers):
    """View of another dataset with different source numbers and source names. The sources of a dataset are the datasets
    that it blends. The new numbers and names are unique in the run. Source k gets the number `numbers[k]` and the name
    `names[numbers[k]]`. Samples that pad the last batch beyond the dataset's end are attributed to the first source.
    """

    def __init__(self, inner: Dataset, numbers: Sequence[int], names: Sequence[str] | None = None) -> None:
        super().__init__(inner)
        self.numbers, self.names = np.array(numbers, np.int64), names

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return self.numbers[super().sources_of(samples)]

    def origin(self, index: int) -> str:
        """Return where a sample starts, in the form `source:document+token`. `source` is the name of the source, which
        is unique in the run."""
        inner = super().origin(index)
        if self.names is None:
            return inner
        (source,) = self.sources_of(range(index, index + 1)).tolist()
        return f"{self.names[source]}:{inner.rpartition(':')[2]}"


class WholeBatches(_SameNumbers):
    """View of another dataset that is padded to a multiple of the batch size. The padding consists of copies of the
    first sample, and is excluded from the loss."""

    def __init__(self, inner: Dataset, batch_size: int) -> None:
        super().__init__(inner)
        self.samples = ceil(len(inner) / batch_size) * batch_size

    def __getitem__(self, index: int) -> Sample:
        if index < len(self.inner):
            return self.inner[index]
        sample = dict(self.inner[0])
        loss_mask = sample["loss_mask"]
        assert loss_mask is not None
        return sample | {"loss_mask": np.zeros_like(loss_mask)}
