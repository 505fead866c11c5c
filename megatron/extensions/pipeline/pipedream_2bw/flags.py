"""Registers the 2bw schedule and the components that it requires. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import Section
from megatron.core.config.optimizers import STATE_STORES, StatePlan
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, Schedule, one_f_one_b
from megatron.extensions.pipeline.pipedream_2bw.lists import lists_of_step
from megatron.extensions.pipeline.pipedream_2bw.rules import NAME, two_versions
from megatron.training.step_parts import STEP_PARTS

PREVIOUS = "previous_param"
"""Name of the optimizer state that contains the parameters before the last update. Checkpoints store this state in the
dtype of the parameters."""

HERE = "megatron.extensions.pipeline.pipedream_2bw"


@dataclass(frozen=True)
class TwoVersions:
    """Setting that `--pipeline-schedule 2bw` passes to other components of a run. No flag sets this value."""

    kept: bool = False


class StoredMain(StatePlan):
    """State plan of the 2bw schedule. Main parameters are always stored separately from the two versions of the
    weights, even if main parameters and weights have the same dtype."""

    optional = (PREVIOUS,)

    def holds(self, optimizer: Section) -> bool:
        return optimizer.options(TwoVersions).kept

    def main_kind(self, optimizer: Section, params_dtype: str, main_dtype: str, on_host: bool = False) -> str:
        return "stored"


def two_bw(p: int, m: int) -> Schedule:
    """Return the action lists of PipeDream-2BW (arXiv 2006.09503, section 3.1). Within one step, the lists are the same
    as for 1F1B."""
    return one_f_one_b(p, m)


PIPELINE_SCHEDULES.register(
    NAME,
    two_bw,
    of_step=lists_of_step,
    asks_for=(TwoVersions(kept=True),),
    rules=two_versions,
)
STEP_PARTS.register(
    "two versions of the weights",
    f"{HERE}.continued_steps:PARTS",
    when=lambda config: config.options(TwoVersions).kept,
    kept=lambda rank: rank.parameters + rank.gradients,
    kept_name="the weights before the last update, and gradients that wait for the norm",
)
STATE_STORES.register("two versions", f"{HERE}.two_versions:VersionedShard", plan=StoredMain())
