"""Delayed scaling of fp8 from step to step (arXiv 2209.05433, section 3; as NVIDIA's TransformerEngine has it)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
from megatron.core.config.precision import PrecisionConfig
from megatron.core.fp8.casts import E4M3, LARGEST, formats, multiplier_of
from megatron.core.fp8.recipes import DelayedGemms
from megatron.core.parallel_state import Axis


class DelayedScaling:
    """The histories of largest values of all fp8 layers of a rank, in one piece of memory.

    Every rank of a pipeline stage has those of the stage, equal on all: what the ranks have noted in a step, each of
    its own part of the sequence, the features and the batch, becomes one maximum. Histories are states of the model:
    checkpoints carry them, and the multipliers follow from them.
    """

    def __init__(self, config: PrecisionConfig, modules: Iterable[nn.Module], stage: Axis) -> None:
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
        """Makes the multipliers what the histories say, after those were loaded."""
        if self.layers:
            amax = self.history.amax(dim=-1) if self.takes_max else self.history[..., 0]
            self.multiplier.copy_(multiplier_of(amax, self.largest, self.margin))

    @torch.no_grad()
    def end_step(self, skip: Tensor) -> None:
        """Moves the histories on by what was noted in this step, unless it updated nothing (`skip` is 1); a value that
        is not finite leaves its own history. One reduction of 3 numbers a layer, collective over the stage."""
        if not self.layers:
            return
        amax = all_reduce_(self.amax.nan_to_num_(nan=torch.inf), self.stage, dist.ReduceOp.MAX).unsqueeze(-1)
        moved = torch.cat((amax, self.history[..., :-1]), dim=-1)
        self.history.copy_(torch.where((skip > 0) | amax.isinf(), self.history, moved))
        self.amax.zero_()
        self.refresh()

    def forget_step(self) -> None:
        """Drops what a step that will not be ended has noted."""
        if self.layers:
            self.amax.zero_()
