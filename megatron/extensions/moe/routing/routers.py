"""Routers that balance the choice of experts or choose at random, and the weights of SparseMixer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import BatchContext
from megatron.core.collectives import all_gather
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import Scores
from megatron.core.dropout import random_bits
from megatron.core.init import site_key
from megatron.core.moe.router import SoftmaxScores, TopKRouter, without_rounding
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.torch_private import AutogradContext
from megatron.extensions.moe.routing.flags import RoutingFlags, balances_choices


class SpecialRouter(TopKRouter):
    """Router whose choices in training are balanced by Sinkhorn's algorithm, or random."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        self.sinkhorn, own = balances_choices(config), config.options(RoutingFlags)
        forced = own.moe_router_force_load_balancing
        self.random_logits = RandomLogits(f"{name}.random_logits", ctx.seed) if forced else None

    @staticmethod
    def make_scores(config: TransformerConfig) -> Scores:
        """Scores of sparsemixer routing."""
        return SparseMixerScores(before_choice=False, eps=config.options(RoutingFlags).moe_sparsemixer_eps)

    def logits_of(self, x: Tensor, context: BatchContext) -> Tensor:
        logits = super().logits_of(x, context)
        if self.random_logits is None or not self.training:
            return logits
        random: Tensor = self.random_logits(logits, context.places_of(logits, self.shard), context)
        return random

    def ranked(self, logits: Tensor, context: BatchContext) -> Tensor:
        if not self.sinkhorn or not self.training:
            return super().ranked(logits, context)
        even = sinkhorn_bias(logits, context.places_of(logits, self.shard), self.sequence)
        return without_rounding(logits.detach() + even)


@dataclass(frozen=True)
class SparseMixerScores(SoftmaxScores):
    """For each chosen expert in turn, a softmax over the experts that were not chosen earlier and whose logits are near
    the largest one (SparseMixer, arXiv 2409.12136, section 2.1.2, without its random choice in training)."""

    eps: float

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        found = []
        for place in range(chosen.shape[-1]):
            left = logits.scatter(-1, chosen[..., :place], float("-inf"))
            largest, sizes = left.detach().amax(-1, keepdim=True), logits.detach().abs()
            far = (largest - logits.detach()) / sizes.maximum(largest) > 2 * self.eps
            found.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen[..., place : place + 1]))
        return torch.cat(found, dim=-1)


class RandomLogits(nn.Module):
    """Replace logits by random numbers, for benchmarks. They depend only on the seed, layer, sample, position in the
    sample and expert, so that experts receive about equally many tokens, whatever the router has learnt.

    The numbers are uniform in [-2, 2). Gradients pass straight through to the logits, so that a step costs the same as
    usual.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.key = site_key(seed, name)

    def forward(self, logits: Tensor, places: Tensor, context: BatchContext) -> Tensor:
        """logits [s, b, E] and positions [s] of this rank's tokens -> [s, b, E]"""
        bits = random_bits(self.key, context.sample_index, places, logits.shape[-1])
        return _StraightThrough.apply(logits, bits.to(logits.dtype) * 2.0**-30)


class _StraightThrough(torch.autograd.Function):
    """Return the second operand, with the gradient of the first."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


SINKHORN_ITERATIONS = 16
"""A fixed number: a convergence test would wait for the device, and could end differently under another layout."""


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, places: Tensor, sequence: Axis) -> Tensor:
    """Logarithms of the experts' Sinkhorn factors: logits [s, b, E] of this rank's tokens -> [b, E].

    The rows (tokens) and columns (experts) of exp(logits) are scaled until all rows have equal sums, and all columns
    too. A token's experts are then its k largest entries, so that the experts of each sequence receive about equally
    many tokens (Clark et al., arXiv 2202.01169, S-BASE). A token's own factor does not affect its choice, so in the
    logarithm only a bias for each expert remains.

    The tokens of one sequence are scaled together, whichever ranks hold them, and separately from other sequences:
    neither the layout nor the micro-batch size changes the choice. `places` [s] are the positions of the tokens in
    their sequences, which are sharded along `sequence`. Collective over `sequence`.
    """
    whole = all_gather(logits, sequence)[all_gather(places, sequence).argsort()]  # in the same order under every layout
    bias = whole.new_zeros(whole.shape[1:])
    for _ in range(SINKHORN_ITERATIONS):
        of_tokens = (whole + bias).logsumexp(-1, keepdim=True)
        bias = -(whole - of_tokens).logsumexp(0)
    return bias
