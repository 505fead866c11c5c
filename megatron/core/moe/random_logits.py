"""Random router logits, for benchmarks: experts receive about equally many tokens, whatever the router has learnt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import BatchContext
from megatron.core.dropout import random_bits
from megatron.core.init import site_key


class RandomLogits(nn.Module):
    """Replaces logits by random numbers that depend on seed, layer, sample, place in the sample and expert only.

    Uniform in [-2, 2). Gradients pass straight through to the logits, so that the step costs what it always does.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.key = site_key(seed, name)

    def forward(self, logits: Tensor, places: Tensor, context: BatchContext) -> Tensor:
        """logits [s, b, E] and places [s] of this rank's tokens -> [s, b, E]"""
        bits = random_bits(self.key, context.sample_index, places, logits.shape[-1])
        return _StraightThrough.apply(logits, bits.to(logits.dtype) * 2.0**-30)


class _StraightThrough(torch.autograd.Function):
    """The second operand, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
