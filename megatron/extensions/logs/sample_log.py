"""The samples that each step took, in order, as they came out of the data iterators: one JSON object a line.

    {"iteration": 3, "samples": [16, 23], "origins": ["data_text_document:412+96", ...], "crc32": ["5b0ea3c1", ...]}

`samples` are the first and the last by their number in the run, `origins` the dataset with the document and the token
in it where each begins, `crc32` sums of the token ids that the model was given. The first rank of every data-parallel
group of a step reports its samples, so the file shows the samples trained, not those planned: the same seed and data
give the same file at every layout, micro-batch size and number of workers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from megatron.core.collectives import gather_objects
from megatron.core.datasets.samplers import MicroBatch
from megatron.extensions.logs.flags import LogsConfig
from megatron.training.hooks import Callback, RunView
from megatron.training.metrics.sinks import JsonLinesSink
from megatron.training.progress import Step
from megatron.training.run import TrainingRun


class SampleLog(Callback):
    """--sample-log."""

    def on_start(self, run: RunView) -> None:
        assert isinstance(run, TrainingRun)
        state = run.runtime.state
        self._sink: JsonLinesSink | None = None
        if state.tp.first and state.cp.first and state.pp.first:
            self._dataset, self._dp = run.data.train.dataset, state.dp
            if state.dp.first:
                path = Path(str(self.config.options(LogsConfig).sample_log))
                self._sink = JsonLinesSink(path, run.progress.iteration)
            run.data.watchers.append(self._write)

    def _write(self, step: Step, batches: Sequence[MicroBatch]) -> None:
        """A collective of the data-parallel ranks."""
        mine = [sample for batch in batches for sample in _samples(batch)]
        found = sorted(sample for part in gather_objects(mine, self._dp) for sample in part)
        if self._sink is None:
            return
        numbers = [number for number, _ in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), f"step {step.iteration} took samples {numbers}"
        self._sink.write(
            {
                "iteration": step.iteration,
                "samples": [numbers[0], numbers[-1]],
                "origins": [self._dataset.origin(number) for number in numbers],
                "crc32": [f"{checksum:08x}" for _, checksum in found],
            }
        )

    def on_end(self, run: RunView) -> None:
        if self._sink is not None:
            self._sink.close()


def _samples(batch: MicroBatch) -> list[tuple[int, int]]:
    """(number, checksum of its tokens) of every sample."""
    numbers, tokens = batch["sample_index"], batch["tokens"]
    assert numbers is not None and tokens is not None
    return [
        (number, zlib.crc32(row.numpy().tobytes())) for number, row in zip(numbers.tolist(), tokens.cpu(), strict=True)
    ]
