"""Callbacks that log the balance of attention work between data-parallel replicas and between context-parallel
ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.extensions.data.packing.dealing import WorkDealer
from megatron.extensions.data.packing.dividing import Divider
from megatron.extensions.data.packing.survey import context_line, imbalances, work_line
from megatron.training.hooks import Callback, Meter
from megatron.training.metrics.sinks import Record
from megatron.training.progress import Interval, Step
from megatron.training.run import TrainingRun


class WorkOfReplicas(Callback, Meter):
    """Callback that logs the ratio of the busiest replica's attention work to the mean work per replica
    (--balance-packed-samples).

    The work depends only on document lengths, so the first rank computes it for all replicas.
    """

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.data = run.data
        self.device = run.runtime.device
        self.computes = run.runtime.state.world.first
        self.steps: dict[int, tuple[float, float]] = {}
        return (self,)

    def begin_step(self, step: Step) -> None:
        train = self.data.train
        if self.computes and isinstance(train.deal, WorkDealer):
            samples = range(step.first_sample, step.first_sample + step.samples)
            works = train.deal.works(train.dataset, samples)
            self.steps[step.iteration] = imbalances(works, train.dp_size, train.micro_batch_size)

    def take(self) -> Tensor:
        """Return a float64 tensor with three values. The first value is the work imbalance that would result from
        assigning samples to replicas in order, summed over steps. The second value is the actual work imbalance, summed
        over steps. The third value is the number of steps. All values are zero on all ranks except the first."""
        sums = [sum(values) for values in zip(*self.steps.values(), strict=True)] or [0.0, 0.0]
        sums.append(float(len(self.steps)))
        self.steps = {}
        return torch.tensor(sums, dtype=torch.float64, device=self.device)

    def report(self, summed: Tensor, interval: Interval) -> Mapping[str, object]:
        before, after, steps = summed.tolist()
        return {"work_imbalance_in_order": before / steps, "work_imbalance": after / steps} if steps else {}

    def lines(self, record: Record) -> list[str]:
        before, after = record.get("work_imbalance_in_order"), record.get("work_imbalance")
        if not isinstance(before, float) or not isinstance(after, float):
            return []
        return [f" {work_line(before, after)}"]


class WorkOfContextRanks(Callback, Meter):
    """Callback that logs two statistics about context parallelism (--balance-packed-samples and
    --hybrid-context-parallel). The first one is the ratio of the busiest rank's attention work to the mean work per
    rank. The second one is the fraction of keys that are sent to other ranks. The values are averaged over the
    micro-batches of all replicas."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.data, self.device = run.data, run.runtime.device
        state = run.runtime.state
        self.counts = state.tp.first and state.cp.first and state.pp.first
        return (self,)

    def take(self) -> Tensor:
        """Return a float64 tensor with the sum of each field of `Imbalance` over this replica's micro-batches, followed
        by the number of micro-batches."""
        divider, sums = self.data.divide, [0.0] * 4
        if isinstance(divider, Divider):
            told, divider.told = divider.told, []
            if self.counts and told:
                sums = [*map(sum, zip(*told, strict=True)), float(len(told))]
        return torch.tensor(sums, dtype=torch.float64, device=self.device)

    def report(self, summed: Tensor, interval: Interval) -> Mapping[str, object]:
        before, after, share, count = summed.tolist()
        if not count:
            return {}
        names = "context_imbalance_in_order", "context_imbalance", "context_keys_sent"
        return dict(zip(names, (before / count, after / count, share / count), strict=True))

    def lines(self, record: Record) -> list[str]:
        before, after = record.get("context_imbalance_in_order"), record.get("context_imbalance")
        if not isinstance(before, float) or not isinstance(after, float):
            return []
        return [f" {context_line(before, after)}"]
