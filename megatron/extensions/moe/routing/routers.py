"""Router with Sinkhorn or random expert selection, and the score function of SparseMixer."""

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
    """Router that selects experts by Sinkhorn's algorithm or at random in training. In evaluation, it selects experts
    as `TopKRouter` does."""

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
    are computed one after another, in the order in which the experts were chosen. The weight of an expert comes from a
    softmax over the experts that were not chosen before this expert. Experts whose logits are not close to the largest
    of these logits are excluded from the softmax."""

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
    sample, position in the sample, and expert. All experts therefore receive about the same number of tokens, whatever
    the router weights are.

    The random numbers are uniformly distributed in [-2, 2). In the backward pass, the gradients of the random numbers
    are used as the gradients of the logits, so that a step takes as long as a step with real logits.
    """

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        self.key = site_key(seed, name)

    def forward(self, logits: Tensor, places: Tensor, context: BatchContext) -> Tensor:
        """Return the random numbers [s, b, E] that replace `logits` [s, b, E]. `places` [s] contains the positions of
        this rank's tokens."""
        bits = random_bits(self.key, context.sample_index, places, logits.shape[-1])
        return _StraightThrough.apply(logits, bits.to(logits.dtype) * 2.0**-30)


class _StraightThrough(torch.autograd.Function):
    """Autograd function that returns `value`. In the backward pass, the gradient of the result is returned as the
    gradient of `x`."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


SINKHORN_ITERATIONS = 16
"""Number of Sinkhorn iterations. The number is fixed because a convergence test would synchronize with the device, and
because the outcome of the test could depend on the layout."""


@torch.no_grad()
def sinkhorn_bias(logits: Tensor, places: Tensor, sequence: Axis) -> Tensor:
    """Return the biases [b, E] that balance the choice of experts, for the logits [s, b, E] of this rank's tokens.

    The rows (tokens) and columns (experts) of exp(logits) are scaled until all rows have equal sums and all columns
    have equal sums. Each token then selects the k experts with the largest entries in its row, so that all experts
    receive about the same number of tokens from each sequence (S-BASE, Clark et al., arXiv 2202.01169). The row factor
    of a token does not change the order of the entries in its row, so only the column factors of the experts are
    needed. The biases are the logarithms of the column factors.

    The matrix of each sequence is scaled separately, over all ranks that have tokens of the sequence. The choice of
    experts therefore depends neither on the layout nor on the micro-batch size. `places` [s] contains the position of
    each token in its sequence. Sequences are sharded over the ranks of `sequence`, and all of these ranks must call
    this function together.
    """
    whole = all_gather(logits, sequence)[all_gather(places, sequence).argsort()]  # in sequence order
    bias = whole.new_zeros(whole.shape[1:])
    for _ in range(SINKHORN_ITERATIONS):
        of_tokens = (whole + bias).logsumexp(-1, keepdim=True)
        bias = -(whole - of_tokens).logsumexp(0)
    return bias
