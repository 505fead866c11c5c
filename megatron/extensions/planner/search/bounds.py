"""Lower bounds on the step time and the memory of a layout, from what its layers do with a micro-batch. No torch.

Every bound leaves something out and adds nothing, so that no layout is passed over that is among the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.layout import PipelineLayout


class PassTimes(NamedTuple):
    """Seconds of one micro-batch: forward, backward (or the gradient of the input alone), deferred weight gradient."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, more: PassTimes) -> PassTimes:
        return PassTimes(*(a + b for a, b in zip(self, more, strict=True)))


def step_bound(
    stages: Sequence[PassTimes], layout: PipelineLayout, microbatches: int, more: Sequence[float] | None = None
) -> float:
    """Seconds that no schedule of these stages can go below. `more` is what each rank does beside its passes.

    The first forward of a rank waits for the stages before its own, and after the last backward of its own first stage
    those before it have theirs to do. Between the two a rank does all its work, except that deferred weight gradients
    may wait.
    """
    longest = 0.0
    for rank in range(layout.pp):
        own = layout.stages_of(rank)
        before = range(own[0])
        start = sum(stages[stage].forward for stage in before)
        after = sum(stages[stage].backward for stage in before)
        passes = sum(stages[stage].forward + stages[stage].backward for stage in own)
        weights = sum(stages[stage].weight for stage in own)
        ends = start + microbatches * (passes + weights), start + microbatches * passes + max(after, weights)
        longest = max(longest, max(ends) + (0.0 if more is None else more[rank]))
    return longest


@dataclass(frozen=True)
class StageParameters:
    """Elements of a stage's parameters in the whole model: dense ones, and those of experts."""

    dense: int = 0
    expert: int = 0


def states_bound(
    stages: Sequence[StageParameters], layout: PipelineLayout, cut: tuple[int, int], each: tuple[float, float]
) -> list[float]:
    """Bytes of states by pipeline rank, if every parameter is cut into as many parts as a matrix: `cut` and bytes
    `each` are those of dense parameters and of experts."""
    found = []
    for rank in range(layout.pp):
        own = [stages[stage] for stage in layout.stages_of(rank)]
        dense, expert = sum(stage.dense for stage in own), sum(stage.expert for stage in own)
        found.append(dense / cut[0] * each[0] + expert / cut[1] * each[1])
    return found
