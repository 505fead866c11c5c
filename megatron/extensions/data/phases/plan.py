"""Plan of a run with phases, from which `megatron.core` and `megatron.training` read the phases and their learning
rates.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.datasets.dataset import Dataset
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleLength
from megatron.extensions.data.phases.file_phase import FilePhase, planned_phases
from megatron.extensions.data.phases.rules import changes, findings
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import Point, RunConfig
from megatron.training.config.validation import resolve
from megatron.training.plan import History, Phase, RunPlan


class PhaseScheduler(OptimizerParamScheduler):
    """Learning-rate schedule that begins with a phase. Weight decay follows the schedule of the whole run."""

    def __init__(self, whole: OptimizerParamScheduler, own: OptimizerConfig, first_sample: int, samples: int) -> None:
        super().__init__(own, ScheduleLength.in_samples(own, samples))
        self.whole, self.first_sample = whole, first_sample

    def _lr_at(self, samples: int, config: OptimizerConfig) -> float:
        # `samples` does not count skipped steps, so it may be smaller than the phase's first sample when the phase
        # begins. The phase's schedule then starts too late, but never too early.
        return super()._lr_at(max(0, samples - self.first_sample), config)

    def weight_decay_at(self, samples: int) -> float:
        return self.whole.weight_decay_at(samples)


@dataclass(frozen=True)
class PhasePlan(RunPlan):
    """Plan of a run whose phases are defined in a --data-phases file."""

    phases: tuple[FilePhase, ...]
    flag: ClassVar[str] = "--data-phases"

    @classmethod
    def planned(cls, config: RunConfig) -> tuple[Self | None, list[Problem]]:
        found, problems = planned_phases(config)
        return (None if found is None else cls(config, *found)), problems

    @classmethod
    def findings(
        cls,
        config: RunConfig,
        world_size: int,
        judge: Callable[[RunConfig], list[Problem]],
        resolved: RunConfig | None = None,
    ) -> list[Problem]:
        resolved = resolved or resolve(config, world_size)
        found, problems = planned_phases(resolved)
        return findings(config, resolved, judge, None if found is None else found[0], problems)

    def changes(self, history: History) -> Iterator[str]:
        yield from super().changes(history)
        yield from (f"{self.flag}: {line}; {history.remedy}" for line in changes(self.phases, history))

    @property
    def schedule_sizes(self) -> BatchSizes:
        """Batch sizes of the run. A phase that has begun keeps its batch size."""
        return self.sizes

    def changed_batch(self, saved: RunConfig, past: Sequence[Point]) -> None:
        """Return None: no message is needed, because phases that have begun keep their batch sizes when a run is
        resumed."""

    def schedule_of(self, phase: FilePhase) -> OptimizerParamScheduler:
        """Return the phase's own schedule if it has one; otherwise, return the run's schedule."""
        whole = self.schedule()
        if phase.optimizer is None:
            return whole
        return PhaseScheduler(whole, phase.optimizer, phase.first_sample, phase.samples)

    def lines(self, phase: Phase) -> Iterator[str]:
        """Describe the beginning, length, batch sizes and learning rate of a phase."""
        assert isinstance(phase, FilePhase)
        training, length = phase.config.training, phase.config.model.seq_length
        ending = min(self.sizes.iterations(phase.first_sample + phase.samples), self.iterations)
        yield (
            f"phase {phase.name}: from sample {phase.first_sample:,}, iteration {phase.first_iteration + 1:,}, token "
            f"{phase.first_token:,}: {phase.samples:,} samples of {length:,}, {phase.samples * length:,} tokens, "
            f"{ending - phase.first_iteration:,} iterations; global batch {training.global_batch_size}, micro-batch "
            f"{training.micro_batch_size}"
        )
        schedule = self.schedule_of(phase)
        first, last = phase.first_sample, max(phase.first_sample, self.sizes.samples(max(0, ending - 1)))
        points = sorted({first, first + (last - first) // 2, last})
        shown = ", ".join(f"{schedule.lr_at(point):.4g}" for point in points)
        source = f"its own ({phase.optimizer.lr_decay_style})" if phase.optimizer is not None else "the run's"
        yield f"    learning rate, {source}: {shown} at its beginning, middle and end"

    def training_set(self, parts: Sequence[Dataset]) -> Dataset:
        from megatron.extensions.data.phases.phased_dataset import PhasedDataset

        firsts = [phase.first_sample for phase in self.phases]
        return PhasedDataset(firsts, parts, self.samples, self.base.data.dataset != "gpt")
