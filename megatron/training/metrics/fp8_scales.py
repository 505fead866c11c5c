"""Delayed scaling of fp8 as a meter: its amax histories move on with each update."""

from __future__ import annotations

from torch import Tensor

from megatron.core.fp8.delayed_scaling import DelayedScaling
from megatron.training.hooks import Meter


class FP8Scales(Meter):
    def __init__(self, scaling: DelayedScaling) -> None:
        self.scaling = scaling

    def end_step(self, skip: Tensor) -> None:
        self.scaling.end_step(skip)

    def step_state(self) -> list[Tensor]:
        return self.scaling.step_state()

    def discard_step(self) -> None:
        self.scaling.discard_step()
