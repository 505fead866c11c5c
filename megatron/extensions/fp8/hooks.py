"""Delayed scaling in a run: its amax histories move on with each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.fp8.delayed_scaling import DelayedScaling
from megatron.extensions.fp8.flags import Fp8Flags
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.initialize import Runtime


class Fp8Scales(Callback, Meter):
    """`DelayedScaling` of a run. Scales follow from the checkpoint's histories once it is loaded."""

    def on_model(self, config: RunConfig, stages: Mapping[int, GPTModel], runtime: Runtime) -> None:
        self.scaling = DelayedScaling(config.options(Fp8Flags), stages.values(), runtime.state.axis("stage"))

    def meters(self, run: Any) -> Sequence[Meter]:
        self.scaling.refresh()
        return [self]

    def end_step(self, skip: Tensor) -> None:
        self.scaling.end_step(skip)

    def step_state(self) -> list[Tensor]:
        return self.scaling.step_state()

    def discard_step(self) -> None:
        self.scaling.discard_step()
