"""Data sets of a run: their names, and the epochs over each that it has trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.blended import sources_of
from megatron.core.datasets.build import parse_blend
from megatron.core.datasets.gpt_dataset import Dataset
from megatron.training.plan import RunPlan

PART = 1 << 20
"""Samples that are counted at a time."""


class SourceNames:
    """Numbers and names of the data sets of a run: a path is one source, in whichever phase and split."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.names: list[str] = []
        self.tokens: dict[int, int] = {}
        """Tokens of an epoch of those that are trained on."""

    def numbers(self, config: DatasetConfig, split: str) -> list[int]:
        """Number of each source of a split's blend, in its order."""
        values = getattr(config, f"{split}_data_path") if config.per_split else config.data_path
        paths = parse_blend("--data-path", values).prefixes if values and config.dataset == "gpt" else [config.dataset]
        return [self._number(path) for path in paths]

    def sized(self) -> tuple[list[str], list[int]]:
        """(names, tokens of an epoch) of all sources; nothing where there are no epochs. Sources that are not trained
        on have one token."""
        if not self.tokens:
            return [], []
        return self.names, [self.tokens.get(number, 1) or 1 for number in range(len(self.names))]

    def _number(self, path: str) -> int:
        if path not in self.paths:
            name = re.sub(r"[^\w.-]+", "-", Path(path.rstrip("/")).name)
            others = sum(each == name or each.startswith(f"{name}-") for each in self.names)
            self.paths.append(path)
            self.names.append(f"{name}-{others + 1}" if others else name)
        return self.paths.index(path)


class Epochs:
    """Tokens taken of each source, as a function of consumed samples. `sizes` are the tokens of an epoch."""

    def __init__(self, plan: RunPlan, dataset: Dataset, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.plan, self.dataset, self.names = plan, dataset, list(names)
        self.sizes = np.array(sizes, np.int64)
        self._at, self._tokens = 0, np.zeros(len(names), np.int64)

    def at(self, consumed_samples: int) -> NDArray[np.float64]:
        """[sources]: epochs that the first `consumed_samples` samples of the run are. Ask in rising order."""
        if consumed_samples < self._at:
            self._at, self._tokens = 0, np.zeros_like(self._tokens)
        for phase in self.plan.phases if self.names else ():
            assert phase.end is not None
            begin, end = max(self._at, phase.first_sample), min(consumed_samples, phase.end)
            for first in range(begin, end, PART):
                part = range(first, min(first + PART, end))
                counts = np.bincount(sources_of(self.dataset, part), minlength=len(self.names))
                self._tokens += counts * phase.config.model.seq_length
        self._at = consumed_samples
        return self._tokens / self.sizes

    def ended(self, consumed_samples: int) -> Iterator[str]:
        """A line for each source of which an epoch has ended since the last question."""
        before, now = self._tokens // self.sizes, self.at(consumed_samples)
        for name, earlier, epochs in zip(self.names, before.tolist(), now.tolist(), strict=True):
            if int(epochs) > earlier:
                yield f"epoch {int(epochs)} of {name} has ended by sample {consumed_samples:,}: {epochs:.3f} epochs"

    def line(self, consumed_samples: int) -> str:
        """Epochs so far of all sources that were taken from."""
        pairs = zip(self.names, self.at(consumed_samples).tolist(), strict=True)
        return ", ".join(f"{name} {epochs:.3g}" for name, epochs in pairs if epochs)
