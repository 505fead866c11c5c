"""The plan of a run of phases, by which the trunk asks for all of them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from megatron.core.datasets.gpt_dataset import Dataset
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.extensions.phases.file_phase import FilePhase, planned_phases
from megatron.extensions.phases.rules import changes, findings
from megatron.extensions.phases.schedule import phase_lines, schedule_of, whole_schedule
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from megatron.training.plan import History, Phase, RunPlan

if TYPE_CHECKING:
    from megatron.training.run import TrainingRun


@dataclass(frozen=True)
class PhasePlan(RunPlan):
    """The phases of a file."""

    phases: tuple[FilePhase, ...]
    flag: ClassVar[str] = "--data-phases"

    @classmethod
    def planned(cls, config: RunConfig) -> tuple[Self | None, list[Problem]]:
        found, problems = planned_phases(config)
        return (None if found is None else cls(config, *found)), problems

    @classmethod
    def findings(cls, config: RunConfig, world_size: int, judge: Callable[[RunConfig], list[Problem]]) -> list[Problem]:
        resolved = resolve(config, world_size)
        found, problems = planned_phases(resolved)
        return findings(config, resolved, judge, None if found is None else found[0], problems)

    def changes(self, history: History) -> Iterator[str]:
        yield from super().changes(history)
        yield from (f"{self.flag}: {line}; {history.remedy}" for line in changes(self.phases, history))

    def schedule(self) -> OptimizerParamScheduler:
        return whole_schedule(self)

    def lines(self, phase: Phase) -> Iterator[str]:
        assert isinstance(phase, FilePhase)
        return phase_lines(self, phase)

    def training_set(self, parts: Sequence[Dataset]) -> Dataset:
        from megatron.extensions.phases.phase_change import PhasedDataset

        firsts = [phase.first_sample for phase in self.phases]
        return PhasedDataset(firsts, parts, self.samples, self.base.data.dataset != "gpt")

    def enter(self, run: TrainingRun) -> None:
        from megatron.extensions.phases.phase_change import change_phase

        # What is only evaluated is evaluated on the data of the phase that it was trained in.
        phase = self.at(run.progress.consumed_samples - self.base.training.skip_train)
        if run.config is not phase.config:
            assert isinstance(phase, FilePhase)
            change_phase(run, phase, schedule_of(self, phase))

    def is_over(self, run: TrainingRun) -> bool:
        return run.config is not self.at(run.progress.consumed_samples).config
