"""The training samples of a run of phases, as one data set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_order import SampleOrder, sources_of


class PhasedDataset(SampleOrder):
    """The training samples of a run under their numbers in it: sample i is sample i - `firsts[k]` of `parts[k]`, where
    k is the phase that it is in, or sample i of it if the parts are `numbered_by_run`. Samples of different phases may
    differ in length. `end` is the number of samples of the run."""

    def __init__(self, firsts: Sequence[int], parts: Sequence[Dataset], end: int, numbered_by_run: bool) -> None:
        assert firsts[0] == 0 and len(firsts) == len(parts)
        self.firsts = list(firsts)
        self.parts = list(parts)
        self.samples = end
        self.zeros = [0] * len(parts) if numbered_by_run else self.firsts
        self.fingerprint = parts[0].fingerprint

    def place(self, index: int) -> tuple[Dataset, int]:
        """(data set of its phase, number in it) of a sample. Raises IndexError beyond the end."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        phase = bisect_right(self.firsts, index) - 1
        return self.parts[phase], index - self.zeros[phase]

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        """As of the parts, which number their sources alike."""
        stops = [*self.firsts[1:], self.samples]
        found = [
            sources_of(part, range(max(samples.start, first) - zero, min(samples.stop, stop) - zero))
            for first, stop, zero, part in zip(self.firsts, stops, self.zeros, self.parts, strict=True)
            if max(samples.start, first) < min(samples.stop, stop)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)
