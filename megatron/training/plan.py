"""Plan of a run, which sets its length, batch sizes and learning rate before the run starts. This module does not
import torch.

By default, a run has a single phase, whose configuration results from the flags. An extension may register a plan with
several phases in `PLANS`. Everything in a phase depends only on the number of samples consumed before a step, so a run
can resume at any step and under any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleLength
from megatron.core.registry import Registry
from megatron.training.config.batch_size import START, BatchSizes, legal_sizes, samples_of_run
from megatron.training.config.flags import field_table, value_of
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import Point, RunConfig

if TYPE_CHECKING:
    from megatron.core.datasets.dataset import Dataset


@dataclass(frozen=True)
class Phase:
    """Part of a run in which the configuration does not change."""

    config: RunConfig
    """The run's configuration in this phase."""

    first_sample: int = 0
    first_token: int = 0
    end: int | None = None
    """Number of samples that the run has consumed at the end of the phase. None for a run of one epoch, whose length
    depends on the data."""

    planned: tuple[int, ...] = ()
    """Lengths, in samples, that this phase had in earlier plans of the run, oldest first."""

    @property
    def name(self) -> str:
        """Name of the phase, or an empty string if the run has only one phase."""
        return ""

    @property
    def samples(self) -> int:
        assert self.end is not None
        return self.end - self.first_sample

    @property
    def lengths(self) -> tuple[int, ...]:
        """Planned lengths of the phase in samples: the lengths in earlier plans, oldest first, followed by the length
        in this plan. A plan that does not lengthen the phase does not change the sample order, and its length is
        omitted."""
        longer = self.end is not None and self.samples > max(self.planned, default=0)
        return (*self.planned, self.samples) if longer else self.planned

    @property
    def values(self) -> Mapping[str, object] | None:
        """Dict of the configuration values that must not change once the phase has started, keyed by field. None if the
        checkpoint's configuration already contains these values."""
        return None

    def take_up(self, source: Any, prefix: str, format: Any) -> None:
        """Prepare a training source for this phase. `source` is the `SourceOrder` of the training source after all
        earlier phases. This method may change the order of the samples in `source`. `format` is the `SampleFormat` of
        this phase's samples."""


@dataclass(frozen=True)
class History:
    """Record of the phases that a run has started."""

    consumed_samples: int
    phases: list[dict[str, Any]]
    """Records of the phases that the run has started, in the format of `RunPlan.record`."""

    config: RunConfig | None = None
    """Configuration of the run that saved the checkpoint."""

    @property
    def remedy(self) -> str:
        rule = "do not change the phases that have begun"
        return f"{rule}; a new phase may begin at sample {self.consumed_samples} or later"


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run with one phase, and the base class of other plans."""

    base: RunConfig
    """Configuration that results from the flags, before a phase changes it."""

    phases: tuple[Phase, ...]
    sizes: BatchSizes
    """Global batch sizes over the whole run."""

    flag: ClassVar[str] = "--load"
    """Flag with which error messages about phases begin."""

    @classmethod
    def planned(cls, config: RunConfig) -> tuple[Self | None, list[Problem]]:
        """Return the plan of a resolved configuration, and the list of problems that were found. If there are problems,
        the plan is None."""
        sizes, iterations = legal_sizes(config), config.training.train_iters
        end = samples_of_run(config) if iterations is None else sizes.samples(iterations)
        return cls(config, (Phase(config, end=end),), sizes), []

    @classmethod
    def findings(
        cls,
        config: RunConfig,
        world_size: int,
        judge: Callable[[RunConfig], list[Problem]],
        resolved: RunConfig | None = None,
    ) -> list[Problem]:
        """Return the problems in the configurations of all phases of a run. `judge` returns the problems with one
        configuration, without checking its phases. `resolved` is the resolved configuration, if already known."""
        return judge(config)

    @property
    def samples(self) -> int:
        """Number of samples in the whole run."""
        end = self.phases[-1].end
        assert end is not None
        return end

    @property
    def iterations(self) -> int:
        """Number of steps in the whole run."""
        given = self.base.training.train_iters
        return given if given is not None else self.sizes.iterations(self.samples)

    def at(self, consumed_samples: int) -> Phase:
        """Return the phase of the step that begins after `consumed_samples` samples. If the run has consumed all
        samples, return the last phase."""
        return self.phases[sum(consumed_samples >= phase.first_sample for phase in self.phases[1:])]

    def trained(self, consumed_samples: int) -> Phase:
        """Return the phase of the last step of a run that has consumed `consumed_samples` samples."""
        return self.at(max(0, consumed_samples - 1))

    def tokens(self, consumed_samples: int) -> int:
        """Return the number of tokens in the first `consumed_samples` samples."""
        phase = self.trained(consumed_samples)
        return phase.first_token + (consumed_samples - phase.first_sample) * phase.config.model.seq_length

    @property
    def longest(self) -> Phase:
        """Phase whose micro-batches contain the most tokens, so that its activations are the largest."""
        return max(
            self.phases, key=lambda p: (p.config.training.micro_batch_size * p.config.model.seq_length, p.first_sample)
        )

    def record(self, consumed_samples: int) -> list[dict[str, Any]]:
        """Return a record of each phase that has started, in JSON types. Checkpoints contain these records."""
        begun = [phase for phase in self.phases if phase.first_sample < max(1, consumed_samples)]
        return [
            {
                "name": phase.name,
                "first_sample": phase.first_sample,
                "planned": list(phase.lengths),
                "values": phase.values,
            }
            for phase in begun
        ]

    def continued(self, history: History | None) -> Self:
        """Return this plan, but with the lengths that `history` records for the phases that the run has already
        started. The sample order of these phases therefore does not change.

        Raises ValueError if a started phase has changed. The message lists every problem."""
        if history is None:
            return self
        if problems := list(self.changes(history)):
            raise ValueError("\n".join(problems))
        pairs = zip(self.phases, history.phases, strict=False)
        begun = [replace(phase, planned=tuple(saved["planned"])) for phase, saved in pairs]
        return replace(self, phases=(*begun, *self.phases[len(begun) :]))

    def changes(self, history: History) -> Iterator[str]:
        """Yield a line for each difference between the phases that the run has started and the phases of this plan."""
        if missing := ", ".join(str(saved["name"]) or "0" for saved in history.phases[len(self.phases) :]):
            rule = f"the checkpoint's run has begun phase {missing}, which is missing"
            yield f"{self.flag}: {rule}; {history.remedy}"

    @property
    def schedule_sizes(self) -> BatchSizes:
        """Return the batch sizes that convert iterations to positions in the learning-rate and weight-decay schedule.

        If the flags give the run's length in iterations, the schedule depends on the iteration. A run may resume with
        different batch sizes, and this must not change the rest of the schedule. The schedule therefore counts samples
        as if the run had used the current batch sizes from the beginning."""
        return self.sizes if self.base.training.train_iters is None else replace(self.sizes, past=START)

    def schedule(self) -> OptimizerParamScheduler:
        """Return the schedule of learning rate and weight decay over the whole run. Raises ValueError if a length does
        not fit the run."""
        config, training = self.base.optimizer, self.base.training
        if training.train_samples is not None or training.train_tokens is not None:
            length = ScheduleLength.in_samples(config, self.samples)
        else:
            length = ScheduleLength.in_iterations(config, self.iterations, self.schedule_sizes.samples)
        return OptimizerParamScheduler(config, length)

    def schedule_position(self, scheduled_samples: int, saved: RunConfig) -> int:
        """Convert a position in the learning-rate schedule of the saved run to a position in the schedule of this
        plan."""
        begun = saved.training.train_iters is not None and plan_class(saved) is RunPlan
        before, now = replace(legal_sizes(saved), past=START) if begun else self.sizes, self.schedule_sizes
        return scheduled_samples if before == now else now.samples(before.iterations(scheduled_samples))

    def changed_batch(self, saved: RunConfig, past: Sequence[Point]) -> str | None:
        """If the batch sizes have changed since the saved run, return a line that states how many iterations and
        samples remain; otherwise, return None. The run resumes at the last position in `past`."""
        fresh = replace(legal_sizes(self.base), past=START)
        if fresh == replace(legal_sizes(saved), past=START):
            return None
        sizes, given = fresh.resumed(past), self.base.training.train_iters
        end = sizes.iterations(self.samples) if given is None else given
        iterations, samples = end - past[-1][0], sizes.samples(end) - past[-1][1]
        return (
            f"another batch size from here on: {max(0, iterations):,} iterations and {max(0, samples):,} samples "
            f"remain until iteration {end:,}; {self._unit_of_schedule(saved)}"
        )

    def _unit_of_schedule(self, saved: RunConfig) -> str:
        """Describe the unit of the learning-rate schedule in this run and in the saved run."""
        units = "the samples", "the iteration"
        now = units[self.base.training.train_iters is not None]
        before = units[saved.training.train_iters is not None and plan_class(saved) is RunPlan]
        if now == before:
            return f"the learning rate depends on {now}, as before"
        return f"the learning rate now depends on {now}; before, it depended on {before}"

    def lines(self, phase: Phase) -> Iterator[str]:
        """Yield lines that describe a phase, for plans and logs."""
        yield from ()

    def training_set(self, parts: Sequence[Dataset]) -> Dataset:
        """Return the dataset that contains the samples of all phases, in the order of the run. `parts` contains one
        dataset for each phase."""
        return parts[0]


class PlanClass(Protocol):
    """Type of the registered plans: classes derived from `megatron.training.plan.RunPlan`."""

    def planned(self, config: RunConfig) -> tuple[object, list[Problem]]: ...

    def findings(
        self,
        config: RunConfig,
        world_size: int,
        judge: Callable[[RunConfig], list[Problem]],
        resolved: RunConfig | None = None,
    ) -> list[Problem]: ...


@dataclass(frozen=True)
class PlanFacts:
    """Properties of a plan class that are known before the class is imported."""

    field: str
    """Name of the configuration field whose flag enables the plan."""


PLANS = Registry("plan", PlanFacts, protocol=PlanClass)
"""Plan classes for runs with several phases, each with the configuration field that enables it:

    @PLANS.register("own phases", field="own_phases")
    class OwnPhases(RunPlan): ...
"""


def plan_class(config: RunConfig) -> type[RunPlan]:
    """Return the plan class that the flags in `config` select."""
    for name in PLANS:
        if value_of(config, field_table()[PLANS.facts(name).field]) is not None:
            found = PLANS[name]
            assert isinstance(found, type) and issubclass(found, RunPlan), f"plan {name} must be derived from RunPlan"
            return found
    return RunPlan


def plan_of(config: RunConfig) -> RunPlan:
    """Return the plan of a resolved and validated configuration."""
    plan, problems = plan_class(config).planned(config)
    assert plan is not None and not problems, problems
    return plan
