"""Top-k router of mixture-of-experts layers, which selects the experts of each token and computes their weights.

The selection of experts for a token usually depends only on the token's hidden state. If experts drop tokens, or with
Sinkhorn routing, the selection also depends on the other tokens of the sequence. The selection never depends on the
micro-batch, the rank or the parallel layout. Scores are computed in fp32, or in fp64 if the parameters are fp64,
because small differences between scores decide which experts are selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import BatchContext
from megatron.core.collectives import all_gather
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import ROUTERS, SCORE_FUNCTIONS, Scores
from megatron.core.moe.load_balancing import Balance
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.linear_gemms import rows_of
from megatron.core.tensor_parallel.linear_spec import sequence_partial
from megatron.core.tensor_parallel.weight_grad import (
    WeightGradQueue,
    accumulate_weight_grad,
    add_product_,
    saved_without_graph,
)
from megatron.core.torch_private import AutogradContext


class _RouterContext(AutogradContext):
    weight: Tensor
    dtype: torch.dtype
    queue: WeightGradQueue


class RouterFunction(torch.autograd.Function):
    """Autograd function that computes the router logits x Wᵀ in `dtype`: x [s, b, h], W [E, h] -> [s, b, E]."""

    @staticmethod
    def forward(ctx: _RouterContext, x: Tensor, weight: Tensor, dtype: torch.dtype, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.dtype = dtype
        ctx.queue = queue
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: _RouterContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = saved_without_graph(ctx)
        weight, dtype = ctx.weight, ctx.dtype
        dx = grad.matmul(weight.to(dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None

        def add_dw_(out: Tensor, overwrite: bool) -> None:
            add_product_(out, rows_of(grad), rows_of(x).to(dtype), overwrite)

        return dx, accumulate_weight_grad(weight, add_dw_, ctx.queue), None, None


@dataclass(frozen=True)
class SoftmaxScores:
    """Softmax scores. If `before_choice` is False, the softmax is computed over the selected experts (Mixtral, arXiv
    2401.04088, section 2.1). If `before_choice` is True, the softmax is computed over all experts before the
    selection."""

    before_choice: bool

    def ranked(self, logits: Tensor) -> Tensor:
        return logits

    def summed(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.before_choice else logits

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        if self.before_choice:
            return logits.softmax(-1).gather(-1, chosen)
        return logits.gather(-1, chosen).softmax(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    positive = probabilities


@dataclass(frozen=True)
class OwnScores:
    """Scores that are a positive function of each expert's own logit, such as a sigmoid. If `normalized` is True, the
    weights of two or more selected experts are divided by their sum (arXiv 2412.19437)."""

    function: Callable[[Tensor], Tensor]
    normalized: bool = True
    epsilon: float = 1e-20
    """Epsilon that is added to the sum of the weights before the weights are divided by this sum."""

    def ranked(self, logits: Tensor) -> Tensor:
        return self.function(logits)

    summed = positive = ranked

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        scores = self.function(logits.gather(-1, chosen))
        return self._shares(scores, self.epsilon) if self.normalized and chosen.shape[-1] > 1 else scores

    def probabilities(self, logits: Tensor) -> Tensor:
        return self._shares(self.function(logits))

    @staticmethod
    def _shares(scores: Tensor, epsilon: float = 1e-20) -> Tensor:
        return scores / (scores.sum(-1, keepdim=True) + epsilon)


def scores_of(config: TransformerConfig) -> Scores:
    """Create the score function that `config` selects, by calling `make_scores` of the router class that registered the
    score function."""
    name = SCORE_FUNCTIONS.router(config.moe_router_scores.removeprefix("pre_"))
    return ROUTERS[name].make_scores(config)


@dataclass(frozen=True)
class Choice:
    """Selected experts of each token, best first, and their weights."""

    experts: Tensor
    """Selected experts [s, b, k] int64. The value E, which is not a valid expert number, marks a dropped assignment."""

    weights: Tensor
    """Routing weights [s, b, k]. The weights of dropped assignments are 0."""

    most: int | None = None
    """Maximum number of this rank's tokens that an expert accepts. None means that no assignment is dropped, so that
    each token has k experts."""

    kept: Tensor | None = None
    """Sum of the routing weights of each token's zero-computation experts, [s, b, 1]. The MoE layer multiplies its
    input by this sum and adds the product to its output. None if the layer has no zero-computation experts."""


class TopKRouter(nn.Module):
    """Router that selects k of E experts for each token. If scores are equal, the expert with the lower number is
    selected."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.num_experts, self.topk = config.num_experts, config.moe_router_topk
        self.zero_experts = config.moe_zero_experts
        shape = (config.moe_choices, config.hidden_size)
        partial_over = sequence_partial(ctx.sequence_parallel)
        weight = ParamMeta(f"{name}.weight", shape, partial_over=partial_over, role="router")
        random = Init("normal", config.init_method_std)
        bias = ParamMeta(f"{name}.bias", shape[:1], init=random, partial_over=partial_over, role="bias")
        self.weight = make_parameter(weight, ctx)
        self.bias = make_parameter(bias, ctx) if config.add_bias_linear else None
        """Router bias, or None. As in Megatron-LM, the bias is initialized randomly, like the weight."""
        self.balance = Balance(name, config, ctx, self.weight)
        self.scores = scores_of(config)
        self.groups, self.group_topk = config.moe_router_num_groups, config.moe_router_group_topk
        self.group_score_topk = config.moe_router_group_score_topk or self.topk // (self.group_topk or 1)
        self.biased_logits, self.scaling = config.moe_expert_bias_on_logits, config.moe_router_topk_scaling_factor
        self.dtype = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        self.queue, self.sequence = ctx.queue, ctx.state.axis("tp_cp")
        self.shard = ctx.tp.rank if ctx.sequence_parallel else 0
        self.capacity_factor = config.moe_expert_capacity_factor
        in_evaluation = config.moe_eval_capacity_factor
        self.eval_capacity_factor = self.capacity_factor if in_evaluation is None else in_evaluation
        self.min_capacity = config.moe_min_capacity
        self.keep_first = config.moe_token_drop_policy == "position"

    @staticmethod
    def make_scores(config: TransformerConfig) -> Scores:
        """Create the router's score function: softmax, sigmoid or sqrtsoftplus. To use a different score function,
        override this method in a subclass.

        Raises NotImplementedError for any other score function (`config.moe_router_scores`).
        """
        kind = config.moe_router_scores
        if kind in ("softmax", "pre_softmax"):
            return SoftmaxScores(before_choice=kind == "pre_softmax")
        functions: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "sqrtsoftplus": sqrt_softplus}
        if kind not in functions:
            raise NotImplementedError(
                f"the router class that registers the score function {kind!r} must create it in make_scores()"
            )
        return OwnScores(functions[kind], config.moe_router_topk_normalization, config.moe_router_topk_epsilon)

    def forward(self, x: Tensor, context: BatchContext) -> Choice:
        """Return the selected experts and the routing weights [s, b, k] of this rank's tokens x [s, b, h]."""
        logits = self.logits_of(x, context)
        ranked = self.ranked(logits, context)
        unbiased = self._best(ranked)
        chosen = self._chosen(logits.detach(), ranked, unbiased, context)
        weights = self.scores.weights(logits, chosen)
        if self.scaling is not None:
            weights = weights * self.scaling
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # During generation, the capacity is unlimited: padding must not use capacity, and the later tokens with which a
        # token competes are not known yet.
        if context.cache is not None:
            factor = None
        capacity = None if factor is None else self._capacity(chosen.shape[0], factor)
        kept = None if capacity is None else self._kept(chosen, weights.detach(), context, capacity)
        if self.training and context.aux_scale is not None:
            probabilities = self.scores.probabilities(logits if self.balance.has_loss else logits.detach())
            weights = self.balance(weights, logits, probabilities, chosen, unbiased, kept, context)
        if kept is not None:
            chosen, weights = chosen.masked_fill(~kept, self.num_experts), weights.masked_fill(~kept, 0.0)
        rows, samples, _ = chosen.shape
        if self.zero_experts:
            zero = chosen >= self.num_experts
            of_tokens = weights.masked_fill(~zero, 0.0).sum(-1, keepdim=True)
            chosen, weights = chosen.masked_fill(zero, self.num_experts), weights.masked_fill(zero, 0.0)
            return Choice(chosen, weights, rows * samples, of_tokens)
        return Choice(chosen, weights, None if capacity is None else min(capacity, rows) * samples)

    def logits_of(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h] -> [s, b, E], in fp32 or fp64"""
        logits: Tensor = RouterFunction.apply(x, self.weight, self.dtype, self.queue)
        return logits if self.bias is None else logits + self.bias.to(self.dtype)

    def ranked(self, logits: Tensor, context: BatchContext) -> Tensor:
        """Return the scores [s, b, E] by which experts are ranked. The scores do not include the expert bias, and are
        computed before the selection is restricted to the best groups."""
        return self.scores.ranked(logits.detach())

    def _chosen(self, logits: Tensor, ranked: Tensor, unbiased: Tensor, context: BatchContext) -> Tensor:
        """Return the selected experts [s, b, k], taking the expert bias and expert groups into account. `unbiased`
        contains the experts that would be selected without bias and groups."""
        bias, summed = self.balance.expert_bias, None
        if bias is not None:
            ranked = summed = (logits if self.biased_logits else self.scores.positive(logits)) + bias
        if self.groups is not None and self.group_topk is not None:
            summed = self.scores.summed(logits) if summed is None else summed
            outside = outside_best_groups(summed, self.groups, self.group_topk, self.group_score_topk)
            return self._best(ranked.masked_fill(outside, float("-inf")))
        return unbiased if bias is None else self._best(ranked)

    def _best(self, scores: Tensor) -> Tensor:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.topk]

    def _capacity(self, rows: int, factor: float) -> int:
        """Return the expert capacity, that is, the maximum number of tokens of each sequence that an expert accepts.
        `factor` is the capacity factor, and `rows` is the number of the sequence's tokens on this rank."""
        length = rows * self.sequence.size
        return max(ceil(factor * self.topk * length / self.num_experts), self.min_capacity)

    def _kept(self, chosen: Tensor, weights: Tensor, context: BatchContext, capacity: int) -> Tensor:
        """Return a boolean mask [s, b, k] that is True if the selected expert has capacity for the token."""
        places = context.places_of(chosen, self.shard)
        priorities = torch.zeros_like(weights) if self.keep_first else without_rounding(weights)
        return within_capacity(chosen, priorities, places, capacity, self.num_experts, self.sequence)


def sqrt_softplus(logits: Tensor) -> Tensor:
    """Compute sqrt(log(1 + e^x)), the score function of DeepSeek-V4."""
    return F.softplus(logits).sqrt()


def outside_best_groups(scores: Tensor, groups: int, group_topk: int, each: int) -> Tensor:
    """Return a bool mask [..., E] that is True for the experts outside a token's `group_topk` best groups.

    The E experts are divided into `groups` groups of consecutive experts. The score of a group is the sum of its `each`
    highest expert scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). In DeepSeek-V2, the score of a group is its
    highest expert score, so `each` is 1 (arXiv 2405.04434, section 2.2.2). If groups have equal scores, the group with
    the lower number is preferred.
    """
    of_groups = scores.unflatten(-1, (groups, -1))
    sums = of_groups.sort(dim=-1, descending=True).values[..., :each].sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[..., :group_topk]
    outside = torch.ones_like(sums, dtype=torch.bool).scatter_(-1, best, False)
    return outside.unsqueeze(-1).expand_as(of_groups).flatten(-2)


def without_rounding(scores: Tensor) -> Tensor:
    """Round scores to a grid whose spacing is much larger than their rounding errors, because rounding errors differ
    between parallel layouts.

    Identical tokens with identical context, for example the first tokens of documents, have the same scores except for
    rounding errors. After this function, their scores are exactly equal under every layout, so that the token positions
    decide which tokens are kept. Sinkhorn routing needs the function for a sequence of identical tokens, in which all
    experts have equal scores.
    """
    grid = 2.0 ** (40 if scores.dtype == torch.float64 else 16)
    return (scores * grid).round_().div_(grid)


@torch.no_grad()
def within_capacity(
    chosen: Tensor, priorities: Tensor, places: Tensor, capacity: int, num_experts: int, sequence: Axis
) -> Tensor:
    """Apply the expert capacity, and return a bool mask [s, b, k] that is True for the assignments that experts accept.
    Each expert accepts the `capacity` tokens of a sequence that have the highest priorities.

    `chosen` [s, b, k], `priorities` [s, b, k] and `places` [s] are the selected experts, the priorities and the
    sequence positions of this rank's tokens. Priorities must be >= 0. If tokens have equal priorities, the earlier
    token is accepted. The capacity applies to the whole sequence, which is sharded over the ranks of `sequence`.
    """
    rows, samples, _ = chosen.shape
    table = priorities.new_full((rows, samples, num_experts), -1.0).scatter_(-1, chosen, priorities)
    table, places = all_gather(table, sequence), all_gather(places, sequence)
    in_order = places.argsort()  # restore the sequence order, because the gathered rows are in rank order
    best = table[in_order].sort(dim=0, descending=True, stable=True).indices
    standing = torch.empty_like(best)
    standing.scatter_(0, best, torch.arange(len(best), device=best.device)[:, None, None].expand_as(best))
    kept = torch.empty_like(standing, dtype=torch.bool)
    kept[in_order] = standing < capacity
    return kept[sequence.rank * rows : (sequence.rank + 1) * rows].gather(-1, chosen)
