"""The flag of phases, and the plan of a run that has some. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.parts import PLANS
from megatron.training.extensions import extension_flags


@extension_flags("phases", may_change=True)
@dataclass(frozen=True)
class PhasesConfig:
    """Phases of a run."""

    data_phases: str | None = flag(None, "--data-stages", path="local")
    """YAML file that divides the run into phases. Each starts at a sample, token or iteration, and has its own data,
    sequence length, batch size and learning rate."""


PLANS.register("phases", "megatron.extensions.phases.plan:PhasePlan", field="data_phases")
