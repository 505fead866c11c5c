"""Training data of a run with phases, as one data set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_order import SampleOrder, sources_of


class PhasedDataset(SampleOrder):
    """Training samples of a run, indexed by the sample number within the whole run. `parts[k]` is the data set of phase
    k, and `firsts[k]` is the first sample of this phase. If `numbered_by_run` is True, the data sets use the sample
    numbers of the run: sample i of the run is sample i of `parts[k]`. Otherwise, sample i of the run is sample i -
    `firsts[k]` of `parts[k]`. Samples of different phases may have different lengths. `end` is the total number of
    samples in the run."""

    def __init__(self, firsts: Sequence[int], parts: Sequence[Dataset], end: int, numbered_by_run: bool) -> None:
        assert firsts[0] == 0 and len(firsts) == len(parts)
        self.firsts = list(firsts)
        self.parts = list(parts)
        self.samples = end
        self.zeros = [0] * len(parts) if numbered_by_run else self.firsts
        self.fingerprint = parts[0].fingerprint

    def place(self, index: int) -> tuple[Dataset, int]:
        """Return the data set of the phase to which sample `index` belongs, and the number of the sample in this data
        set. Raises IndexError if `index` is not a sample number of the run."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        phase = bisect_right(self.firsts, index) - 1
        return self.parts[phase], index - self.zeros[phase]

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        """Return the number of the data source from which each sample is read. The number of a data source is the same
        in all phases."""
        stops = [*self.firsts[1:], self.samples]
        found = [
            sources_of(part, range(max(samples.start, first) - zero, min(samples.stop, stop) - zero))
            for first, stop, zero, part in zip(self.firsts, stops, self.zeros, self.parts, strict=True)
            if max(samples.start, first) < min(samples.stop, stop)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)
