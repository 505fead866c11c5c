"""Flags and registrations of phases and batch size schedules. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.extensions.data.phases.batch_steps import parse_batch_schedule, ramp
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.plan import PLANS


@extension_flags("phases", may_change=True)
@dataclass(frozen=True)
class PhasesConfig:
    """Phases in which a run uses different data, batch sizes or learning rates."""

    data_phases: str | None = flag(None, "--data-stages", path="local")
    """YAML file that divides the run into phases. Each phase starts at a sample, token or iteration, and may have its
    own data, sequence length, batch size and learning rate."""


@extension_flags(
    "changes of the batch size",
    may_change=True,
    rules=f"{__package__}.batch_schedule:rules",
    resolve=f"{__package__}.batch_schedule:with_last_size",
    part_of="training",
)
@dataclass(frozen=True)
class BatchScheduleFlags:
    """Global batch size as a function of consumed samples or tokens."""

    rampup_batch_size: tuple[int, ...] | None = flag(None, many=True, above=0)
    """START INCREMENT SAMPLES: increase the batch size from START in steps of INCREMENT over SAMPLES samples."""

    step_batch_size_schedule: str | None = None
    """Batch sizes by consumed tokens, which replace --global-batch-size: "0:384 200B:768" starts with batch size 384
    and uses 768 after 2e11 tokens."""

    @property
    def changes_batches(self) -> bool:
        """Return True if a flag changes the batch size during the run."""
        return self != BatchScheduleFlags()

    def batch_sizes(self, config: RunConfig) -> BatchSizes:
        """Return the batch size schedule of a run. All defaults of `config` must be filled in, and its values must be
        valid."""
        final = config.training.global_batch_size
        if self.step_batch_size_schedule is not None:
            steps = parse_batch_schedule(self.step_batch_size_schedule)
            ends = [tokens // config.model.seq_length for tokens, _ in steps[1:]]
            return BatchSizes(steps[-1][1], tuple((end, size) for end, (_, size) in zip(ends, steps, strict=False)))
        assert final is not None and self.rampup_batch_size is not None
        return ramp(final, *self.rampup_batch_size)


PLANS.register("phases", "megatron.extensions.data.phases.plan:PhasePlan", field="data_phases")
CALLBACKS.register(
    "phases",
    f"{__package__}.phase_change:EntersPhases",
    when=lambda config: config.options(PhasesConfig).data_phases is not None,
)
CALLBACKS.register(
    "epochs of data sets", f"{__package__}.epochs:EpochLines", when=lambda config: config.data.dataset == "gpt"
)
