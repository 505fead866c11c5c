"""Blends of several datasets: by weight, or by size until all samples are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.indices import BlendIndex, build_blend_index, build_exhaustive_blend_index

MAX_DATASETS = 2**15 - 1


def normalise(weights: Sequence[float]) -> list[float]:
    """Divides weights by their sum, with Megatron-LM's rounding."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


class BlendedDataset(TextDataset):
    """Draws `size` samples in proportion to `weights`, always from the dataset furthest below its share.

    If `size` is None, the weights are the lengths of the datasets, and every sample appears once.
    """

    def __init__(
        self, datasets: Sequence[TextDataset], weights: Sequence[float], size: int | None, cache: IndexCache
    ) -> None:
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

    def _text(self, index: int) -> NDArray[np.int64]:
        dataset, sample = self._place(index)
        return dataset.text(sample)

    def origin(self, index: int) -> str:
        """Start of a sample: `dataset:document+token`."""
        dataset, sample = self._place(index)
        return dataset.origin(sample)

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return self.index.dataset[samples.start : samples.stop].astype(np.int64)

    def _place(self, index: int) -> tuple[TextDataset, int]:
        return self.datasets[int(self.index.dataset[index])], int(self.index.sample[index])

    def _check_counts(self, lengths: Sequence[int]) -> None:
        counts = np.bincount(self.index.dataset, minlength=len(lengths))
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            if count > length:
                raise ValueError(f"the blend draws {count} samples from dataset {number}, which has {length}")
