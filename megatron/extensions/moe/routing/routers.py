"""Routers that select experts by Sinkhorn's algorithm or at random, and SparseMixer weights."""

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
    """Router that chooses experts by Sinkhorn's algorithm or at random during training."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        self.sinkhorn, own = balances_choices(config), config.options(RoutingFlags)
        forced = own.moe_router_force_load_balancing
        self.random_logits = RandomLogits(f"{name}.random_logits", ctx.seed) if forced else None

    @staticmethod
    def make_scores(config: TransformerConfig) -> Scores:
        """Create the score function of SparseMixer routing."""
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
    """SparseMixer weights (arXiv 2409.12136, section 2.1.2), without random expert selection in training. The weights
    are computed one after another, in the order in which the experts were chosen. The weight of an expert is a softmax
    over the experts that were not chosen before and whose logits are near the largest remaining logit."""

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
    """Random numbers that replace router logits in benchmarks. The random numbers depend only on the seed, layer,
    sample, position in the sample, and expert. Experts therefore receive about the same number of tokens for any router
    weights.

    The random numbers are uniformly distributed in [-2, 2). In the backward pass, their gradients are used as the
    gradients of the logits, so that a step costs as much as a step with real logits.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.key = site_key(seed, name)

    def forward(self, logits: Tensor, places: Tensor, context: BatchContext) -> Tensor:
        """Return random numbers [s, b, E] for the logits [s, b, E] and the positions `places` [s] of this rank's
        tokens."""
        bits = random_bits(self.key, context.sample_index, places, logits.shape[-1])
        return _StraightThrough.apply(logits, bits.to(logits.dtype) * 2.0**-30)


class _StraightThrough(torch.autograd.Function):
    """Return `value`. In the backward pass, the gradient of the result is passed to `x`, as if the result were `x`."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


SINKHORN_ITERATIONS = 16
"""Number of Sinkhorn iterations. There is no convergence test, because it would synchronize with the device, and its
outcome could depend on the layout."""


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, places: Tensor, sequence: Axis) -> Tensor:
    """Return the logarithms of the Sinkhorn factors of the experts, [b, E], for the logits [s, b, E] of this rank's
    tokens.

    The rows (tokens) and columns (experts) of exp(logits) are scaled until all rows have equal sums and all columns
    have equal sums. Each token then chooses the experts with its k largest entries, so that experts receive about the
    same number of tokens from each sequence (S-BASE, Clark et al., arXiv 2202.01169). Sinkhorn scaling also multiplies
    all entries of a token by one factor. This factor does not change the order of the entries, so only the factors of
    the experts are needed. Their logarithms are added to the logits as biases.

    Each sequence is scaled separately, over all ranks that have tokens of the sequence. The choice of experts therefore
    depends neither on the layout nor on the micro-batch size. `places` [s] contains the position of each token in its
    sequence. Sequences are sharded over the ranks of `sequence`, and all of these ranks must call this function
    together.
    """
    whole = all_gather(logits, sequence)[all_gather(places, sequence).argsort()]  # in sequence order
    bias = whole.new_zeros(whole.shape[1:])
    for _ in range(SINKHORN_ITERATIONS):
        of_tokens = (whole + bias).logsumexp(-1, keepdim=True)
        bias = -(whole - of_tokens).logsumexp(0)
    return bias
