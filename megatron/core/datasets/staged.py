"""The training samples of a run in stages, under their numbers in the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import Dataset, Sample


class StagedDataset:
    """Sample i of the run is sample i - `firsts[k]` of `parts[k]`, where k is the stage that it lies in. Samples of
    different stages may differ in length. `end` is the number of samples of the run."""

    def __init__(self, firsts: Sequence[int], parts: Sequence[Dataset], end: int) -> None:
        assert firsts[0] == 0 and len(firsts) == len(parts)
        self.firsts, self.parts, self.end = list(firsts), list(parts), end
        self.fingerprint = parts[0].fingerprint

    def __len__(self) -> int:
        return self.end

    def place(self, index: int) -> tuple[int, int]:
        """(stage, number of the sample in it). Raises IndexError beyond the end."""
        if not 0 <= index < self.end:
            raise IndexError(f"sample {index} of {self.end}")
        stage = bisect_right(self.firsts, index) - 1
        return stage, index - self.firsts[stage]

    def __getitem__(self, index: int) -> Sample:
        stage, number = self.place(index)
        return self.parts[stage][number]

    def text(self, index: int) -> NDArray[np.int64]:
        stage, number = self.place(index)
        return self.parts[stage].text(number)

    def origin(self, index: int) -> str:
        """Start of a sample: `dataset:document+token`."""
        stage, number = self.place(index)
        return self.parts[stage].origin(number)

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        """As of the parts, which number their sources alike."""
        stops = [*self.firsts[1:], self.end]
        found = [
            sources_of(part, range(max(samples.start, first) - first, min(samples.stop, stop) - first))
            for first, stop, part in zip(self.firsts, stops, self.parts, strict=True)
            if max(samples.start, first) < min(samples.stop, stop)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)


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


def sources_of(dataset: Dataset, samples: range) -> NDArray[np.int64]:
    """[samples]: number of the source of each sample; 0 where a data set does not tell, or beyond its end."""
    found = np.zeros(len(samples), np.int64)
    if hasattr(dataset, "sources_of"):
        known = dataset.sources_of(samples)
        found[: len(known)] = known
    return found


class From:
    """The samples of another data set from number `first` on."""

    def __init__(self, inner: Dataset, first: int) -> None:
        self.inner, self.first, self.fingerprint = inner, first, inner.fingerprint

    def __len__(self) -> int:
        return len(self.inner) - self.first

    def __getitem__(self, index: int) -> Sample:
        return self.inner[index + self.first]

    def text(self, index: int) -> NDArray[np.int64]:
        return self.inner.text(index + self.first)

    def origin(self, index: int) -> str:
        return self.inner.origin(index + self.first)
