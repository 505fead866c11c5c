"""Counts of the epochs that a run has completed over each data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_order import sources_of
from megatron.training.hooks import Callback
from megatron.training.plan import RunPlan
from megatron.training.run import TrainingRun

PART = 1 << 20
"""Maximum number of samples whose tokens are counted at once."""


class EpochLines(Callback):
    """Callback that logs a line for each completed epoch of a data set."""

    _epochs: Epochs | None = None

    def counted(self, run: TrainingRun) -> Epochs:
        """Return the run's epoch counter. The first call creates the counter."""
        if self._epochs is None:
            self._epochs = Epochs(run.plan, run.data.train.dataset, *run.data.sources.sized())
        return self._epochs

    def on_log(self, run: Any, record: Mapping[str, object]) -> None:
        for line in self.counted(run).ended(run.progress.consumed_samples):
            run.say(f" {line}")


def epochs_so_far(run: TrainingRun) -> str:
    """Return a log message with the number of epochs so far for each data set. The message is empty if no data set was
    used."""
    counting = (callback.counted(run) for callback in run.callbacks if isinstance(callback, EpochLines))
    return next((epochs.line(run.progress.consumed_samples) for epochs in counting), "")


class Epochs:
    """Counter of the tokens that a run uses from each data source up to a given number of consumed samples. `sizes`
    contains the number of tokens in one epoch of each source."""

    def __init__(self, plan: RunPlan, dataset: Dataset, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.plan = plan
        self.dataset = dataset
        self.names = list(names)
        self.sizes = np.array(sizes, np.int64)
        self._at, self._tokens = 0, np.zeros(len(names), np.int64)

    def at(self, consumed_samples: int) -> NDArray[np.float64]:
        """Return how many epochs of each data source the first `consumed_samples` samples of the run contain,
        [sources]. If `consumed_samples` is smaller than in the last call, counting starts again at the first sample."""
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
        """Yield a log line for each data source that has completed an epoch since the last call."""
        before, now = self._tokens // self.sizes, self.at(consumed_samples)
        for name, earlier, epochs in zip(self.names, before.tolist(), now.tolist(), strict=True):
            if int(epochs) > earlier:
                yield f"epoch {int(epochs)} of {name} has ended by sample {consumed_samples:,}: {epochs:.3f} epochs"

    def line(self, consumed_samples: int) -> str:
        """Return a log message with the number of epochs so far for each data source that was used."""
        pairs = zip(self.names, self.at(consumed_samples).tolist(), strict=True)
        return ", ".join(f"{name} {epochs:.3g}" for name, epochs in pairs if epochs)
