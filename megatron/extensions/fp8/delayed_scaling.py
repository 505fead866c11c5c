"""Delayed scaling of fp8: multipliers from the amax history of earlier steps.

ArXiv 2209.05433, section 3; as in NVIDIA's TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import Axis
from megatron.extensions.fp8.casts import E4M3, LARGEST, formats, multiplier_of
from megatron.extensions.fp8.flags import Fp8Flags
from megatron.extensions.fp8.recipes import DelayedGemms
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.initialize import Runtime


class DelayedScaling(Meter):
    """Amax histories of all fp8 layers of a rank, in one tensor, and the multipliers that follow from them.

    All ranks of a pipeline stage hold the same histories. Each rank sees its part of the sequence, the features and the
    batch; at the end of a step their amax values are reduced to one maximum. Histories are part of the model's state,
    and checkpoints hold them.
    """

    def __init__(self, config: Fp8Flags, modules: Iterable[nn.Module], stage: Axis) -> None:
        found = (part for module in modules for part in module.modules())
        self.layers = [part for part in found if isinstance(part, DelayedGemms)]
        self.stage, self.margin, self.takes_max = stage, config.fp8_margin, config.fp8_amax_compute_algo == "max"
        if not self.layers:
            return
        self.history = torch.stack([layer.amax_history.data for layer in self.layers])
        """[layers, 3, steps]"""
        self.amax = torch.stack([layer.amax for layer in self.layers])
        self.multiplier = torch.stack([layer.multiplier for layer in self.layers])
        for row, layer in enumerate(self.layers):
            layer.amax_history.data, layer.amax = self.history[row], self.amax[row]
            layer.multiplier = self.multiplier[row]
        grad_format = formats(config.fp8_format or "")[1]
        largest = [LARGEST[E4M3], LARGEST[E4M3], LARGEST[grad_format]]
        self.largest = torch.tensor(largest, device=self.history.device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recomputes the multipliers from the histories, for example after loading a checkpoint."""
        if self.layers:
            amax = self.history.amax(dim=-1) if self.takes_max else self.history[..., 0]
            self.multiplier.copy_(multiplier_of(amax, self.largest, self.margin))

    @torch.no_grad()
    def end_step(self, skip: Tensor) -> None:
        """Appends this step's amax values to the histories, unless the step was skipped (`skip` is 1).

        A history whose value is not finite stays as it is. Collective over the stage: one reduction, 3 numbers a layer.
        """
        if not self.layers:
            return
        amax = all_reduce_(self.amax.nan_to_num_(nan=torch.inf), self.stage, dist.ReduceOp.MAX).unsqueeze(-1)
        moved = torch.cat((amax, self.history[..., :-1]), dim=-1)
        self.history.copy_(torch.where((skip > 0) | amax.isinf(), self.history, moved))
        self.amax.zero_()
        self.refresh()

    def step_state(self) -> list[Tensor]:
        return [self.history, self.amax, self.multiplier] if self.layers else []

    def discard_step(self) -> None:
        """Drops the amax values of a step that will not reach `end_step`."""
        if self.layers:
            self.amax.zero_()


class Fp8Scales(Callback):
    """`DelayedScaling` of a run. Scales follow from the checkpoint's histories once it is loaded."""

    def on_model(self, config: RunConfig, stages: Mapping[int, GPTModel], runtime: Runtime) -> None:
        self.scaling = DelayedScaling(config.options(Fp8Flags), stages.values(), runtime.state.axis("stage"))

    def meters(self, run: Any) -> Sequence[Meter]:
        self.scaling.refresh()
        return [self.scaling]
