"""Meters for losses by dataset of a blend, the parameter norm, zeros in the gradient, and the samples of each step.

The file of --sample-log contains one JSON object per step. The samples of a step are listed in the order in which the
data iterators returned them:

    {"iteration": 3, "samples": [16, 23], "origins": ["data_text_document:412+96", ...],
     "documents": [[[412, 96, 30], [7, 0, 35]], ...], "crc32": ["5b0ea3c1", ...]}

`samples` contains the numbers of the step's first and last sample, counted from the start of the run. `origins`
contains the dataset, document and token at which each sample starts. `documents` lists, for each sample, the document
parts that form the sample. A part is a list of three numbers: the document, the first token within the document, and
the number of tokens. `crc32` contains a checksum of the token ids that the model received for each sample.
tools/inspect_dataset.py --sample-log decodes a step.

One rank of every data-parallel replica reports the samples that it received, so that the file contains the samples that
were actually used. The file depends on the seed and the data, but not on the layout, the micro-batch size or the number
of workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.collectives import gather_objects
from megatron.core.datasets.sample_order import documents_of
from megatron.core.datasets.samplers import MicroBatch
from megatron.core.optimizer.grad_norm import sum_of_squares
from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.training.hooks import Callback, Evaluation, Meter, RunView
from megatron.training.metrics.meters import Tallies, means
from megatron.training.metrics.sinks import JsonLinesSink
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun


class SourceLosses(Callback):
    """Callback that logs the loss of each dataset of a blend (--log-source-loss)."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        run.data.add_source_ids()
        return (SourceTallies(run),)


class SourceTallies(Tallies):
    """Sums of losses by source dataset on one rank. The last pipeline stage adds the loss of each sample to the row of
    the dataset that contains the sample."""

    def __init__(self, run: TrainingRun) -> None:
        self.names = run.data.sources.names
        state = run.runtime.state
        device = run.runtime.device
        last = [model for model in run.stages.values() if model.last]
        tallies = [torch.zeros(len(self.names), 2, dtype=torch.float64, device=device) for _ in last]
        super().__init__(tallies, len(self.names), state.tp.first, device)
        for model in last:
            model.loss_watchers.append(self._add)

    def _add(self, losses: Tensor, batch: Batch) -> None:
        """Add each sample's loss sum and number of tokens to the row of the dataset that contains the sample. `losses`
        is a tensor [s, b]."""
        if batch.source_ids is not None:
            (tally,), mask = self.tallies, batch.loss_mask
            sums = (losses.t() * mask.to(losses.dtype)).sum(dim=1, dtype=tally.dtype)
            counts = torch.stack((sums, mask.sum(dim=1, dtype=tally.dtype)), dim=1)
            tally.index_add_(0, batch.source_ids, counts)

    def report(self, summed: Tensor, interval: Interval) -> dict[str, float | None]:
        """Return the mean loss of each source dataset. The mean loss of a dataset is None if the loss mask excludes all
        tokens of the dataset."""
        return {f"source_{name}_loss": mean for name, mean in zip(self.names, means(summed), strict=True)}

    def report_evaluation(self, summed: Tensor, split: str) -> dict[str, float]:
        found = zip(self.names, means(summed), strict=True)
        return {f"{split}_source_{name}_loss": mean for name, mean in found if mean is not None}

    @contextmanager
    def evaluating(self, evaluation: Evaluation) -> Iterator[Tensor]:
        """Yield this rank's sums for an evaluation as a float64 tensor [sources, 2]. The sums are complete when the
        `with` block ends. Afterwards, the tallies have the same values as before the evaluation, because a training
        step may still be in progress.
        """
        kept = [tally.clone() for tally in self.tallies]
        self.discard_step()
        found = torch.zeros_like(self.totals)
        yield found
        for tally, before in zip(self.tallies, kept, strict=True):
            if self.counts:
                found += tally
            tally.copy_(before)


class ModelSums(Callback, Meter):
    """Callback that logs sums over all elements of the model (--log-params-norm, --log-num-zeros-in-grad). Each element
    of the model is counted once, even if several ranks hold copies of it."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        options = self.config.options(LogsConfig)
        self.run = run
        self.norm = options.log_params_norm
        self.zeros = options.log_num_zeros_in_grad
        return (self,)

    @torch.no_grad()
    def take(self) -> Tensor:
        """Return two values of this rank as a float64 tensor: the sum of squares of the parameters that this rank
        counts, and the number of zeros in the gradients of these parameters. This method is called after the optimizer
        update. The sum is computed from the main parameters, and the zeros are counted in the gradients after clipping.
        """
        squares = zeros = torch.zeros((), dtype=torch.float64, device=self.run.runtime.device)
        for parameter, grad in self._shards():
            if self.norm:
                squares = squares + sum_of_squares(parameter).to(squares.device)
            if self.zeros and grad is not None:
                zeros = zeros + (grad == 0).sum().to(zeros.device)
        return torch.stack([squares, zeros])

    def report(self, summed: Tensor, interval: Interval) -> Mapping[str, object]:
        squares, zeros = summed.tolist()
        return ({"params_norm": squares**0.5} if self.norm else {}) | ({"num_zeros": zeros} if self.zeros else {})

    def _shards(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield a pair of flat tensors (values, gradient) for each parameter, or part of a parameter, that this rank
        counts. For frozen parameters, the gradient is None."""
        state = self.run.runtime.state
        for shard in self.run.optimizer.shards:
            for piece, span in shard.owned_pieces(*shard.bucket.shard_range):
                if piece.meta.is_first_replica(state.coords) and shard.bucket.copies.first:
                    yield shard.read_main(span.start, span.stop), shard.device_grads[span]
        for stage in self.run.stages.values():
            for parameter in stage.parameters():
                meta = parameter.meta  # type: ignore[attr-defined]
                first = state.axis(meta.data_axis).rank == 0 and meta.is_first_replica(state.coords)
                if not parameter.requires_grad and first:
                    yield parameter.flatten(), None


class SampleLog(Callback):
    """Callback that writes the samples of each step (--sample-log)."""

    def on_start(self, run: RunView) -> None:
        assert isinstance(run, TrainingRun)
        state = run.runtime.state
        self._sink: JsonLinesSink | None = None
        if state.tp.first and state.cp.first and state.pp.first:
            self._dataset, self._dp = run.data.train.dataset, state.dp
            if state.dp.first:
                path = Path(str(self.config.options(LogsConfig).sample_log))
                self._sink = JsonLinesSink(path, run.progress.iteration)
                for name, source in zip(run.data.sources.names, run.data.sources.paths, strict=True):
                    if name != Path(source).name:
                        run.runtime.say(f"{path}: {name} is {source}")
            run.data.watchers.append(self._write)

    def _write(self, step: Step, batches: Sequence[MicroBatch]) -> None:
        """Write the samples of a step. This method is a collective over the data-parallel ranks."""
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
                "documents": [documents_of(self._dataset, number) for number in numbers],
                "crc32": [f"{checksum:08x}" for _, checksum in found],
            }
        )

    def on_end(self, run: RunView) -> None:
        if self._sink is not None:
            self._sink.close()


def _samples(batch: MicroBatch) -> list[tuple[int, int]]:
    """Return a pair for every sample: the index of the sample in the run, and the checksum of its tokens."""
    numbers, tokens = batch["sample_index"], batch["tokens"]
    assert numbers is not None and tokens is not None
    return [
        (number, zlib.crc32(row.numpy().tobytes())) for number, row in zip(numbers.tolist(), tokens.cpu(), strict=True)
    ]
