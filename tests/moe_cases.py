"""Tiny mixture-of-experts layers on one rank, and a plain reference implementation of these layers that processes one
token at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.init import initialize_parameters_
from megatron.core.moe.layer import MoELayer
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.activations import FusedActivation, squared_relu
from megatron.training.config.flags import named_value, run_of
from tests.gpt_cases import model_of, models_in
from tests.harness import tp_context

MIXTRAL, DEEPSEEK = map(model_of, ("mixtral", "deepseek"))
CASES = models_in("experts")


def build_layer(
    config: TransformerConfig,
    state: ParallelState | None = None,
    dtype: torch.dtype = torch.float64,
    sequence_parallel: bool = False,
) -> MoELayer:
    """Return a layer with an uneven expert bias and random weights that do not depend on the layout."""
    state = state or ParallelState()
    config = replace(config, init_method_std=0.4)
    ctx = tp_context(state, sequence_parallel, dtype, initial=config.initial)
    layer = MoELayer("decoder.layers.0.mlp", config, ctx)
    initialize_parameters_(layer.parameters(), 5, state.coords)
    balance = layer.router.balance
    with torch.no_grad():
        layer.router.weight.mul_(0.8 / config.init_method_std)
        if balance.expert_bias is not None:
            balance.expert_bias.copy_(torch.linspace(-0.1, 0.1, balance.num_experts))
        for name, parameter in layer.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(varied(parameter, state))
    return layer


def varied(bias: Tensor, state: ParallelState) -> Tensor:
    """Return distinct expert bias values that are the same under every layout."""
    meta = bias.meta  # type: ignore[attr-defined]
    offset, shape = meta.box(state.coords)
    whole = torch.linspace(-0.5, 0.5, meta.numel, dtype=bias.dtype).sin().view(meta.global_shape)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def context(samples: int, aux_scale: float | None = None, number: int = 0) -> BatchContext:
    scale = None if aux_scale is None else torch.tensor(aux_scale, dtype=torch.float64)
    return BatchContext(torch.arange(samples), aux_scale=scale, number=number)


def projected(layer: Any, x: Any) -> Tensor:
    return x if isinstance(layer, nn.Identity) else F.linear(x, layer.weight, layer.bias)


def written_out(config: TransformerConfig, layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer for x [s, b, h], one token and one expert at a time. Return the output, the auxiliary loss per
    token, and the kept assignments [s, b, E]."""
    s, b, _ = x.shape
    count, k = config.moe_choices, config.moe_router_topk
    logits = F.linear(x, layer.router.weight, layer.router.bias)
    if getattr(layer.router, "random_logits", None) is not None:
        random = layer.router.random_logits(logits.detach(), torch.arange(s), context(b))
        logits = random + (logits - logits.detach())
    sinkhorn = "sinkhorn" in config.moe_router_load_balancing_type
    functions = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda logits: logits.exp().log1p().sqrt()}
    own = "sigmoid" if sinkhorn and k == 1 else config.moe_router_score_function
    scores = functions.get(own, lambda logits: logits.softmax(-1))(logits)
    bias = layer.router.balance.expert_bias
    ranked = scores if bias is None else (logits if config.moe_expert_bias_on_logits else scores) + bias
    if sinkhorn:
        ranked = torch.stack([sinkhorn_matrix(logits[:, j].detach()) for j in range(b)], 1)
    summed = logits if config.moe_router_scores == "softmax" and bias is None else scores
    summed = summed if bias is None else summed + bias
    weights = torch.zeros_like(scores)
    chosen, unbiased = torch.zeros_like(scores), torch.zeros_like(scores)
    for i in range(s):
        for j in range(b):
            legal = in_groups(config, summed[i, j].tolist())
            best = sorted(legal, key=lambda e: (-ranked[i, j, e].item(), e))[:k]
            plain = config.moe_router_pre_softmax or sinkhorn
            divide = k > 1 and config.moe_router_topk_normalization if own in functions else not plain
            total = sum(scores[i, j, e] for e in best) + config.moe_router_topk_epsilon if divide else 1.0
            shares = sparse_mixture(config, logits[i, j], best) if own == "sparsemixer" else scores[i, j] / total
            for e in best:
                weights[i, j, e] = shares[e] * (config.moe_router_topk_scaling_factor or 1.0)
            chosen[i, j, best] = 1
            unbiased[i, j, sorted(range(count), key=lambda e: (-scores[i, j, e].item(), e))[:k]] = 1
    kept = chosen.clone()
    if config.moe_expert_capacity_factor is not None:
        capacity = max(-(-config.moe_expert_capacity_factor * k * s // count), config.moe_min_capacity)
        for j in range(b):
            for e in range(count):
                takers = [i for i in range(s) if chosen[i, j, e]]
                if config.moe_token_drop_policy == "probs":
                    takers.sort(key=lambda i: (-weights[i, j, e].item(), i))
                kept[takers[int(capacity) :], j, e] = 0
    x, hidden = projected(layer.fc1_latent_proj, x), x
    real = range(layer.router.num_experts)
    if config.moe_apply_probs_on_input:
        of_experts = [mlp(config, layer.experts, weights[..., e, None] * x, e) for e in real]
    else:
        of_experts = [weights[..., e, None] * mlp(config, layer.experts, x, e) for e in real]
    out, x = projected(layer.fc2_latent_proj, sum(kept[..., e, None] * y for e, y in enumerate(of_experts))), hidden
    out = out + weights[..., len(real) :].sum(-1, keepdim=True) * x
    shared = layer.shared_experts
    if shared is not None:
        of_shared = mlp(config, shared, x)
        out = out + (of_shared * (x @ shared.gate_weight.T).sigmoid() if config.moe_shared_expert_gate else of_shared)
    if config.moe_output_norm:
        out = (
            out / torch.sqrt(out.square().mean(-1, keepdim=True) + config.norm_epsilon) * layer.output_layernorm.weight
        )
    probabilities = scores / scores.sum(-1, keepdim=True)
    auxiliary = config.moe_z_loss_coeff * logits.logsumexp(-1).square().mean()
    for kind, coefficient in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True):
        counts = unbiased.sum(0)
        shares = [sum(counts[: j + 1]) / (k * s * (j + 1)) for j in range(b)]  # expert load shares in samples 0 to j
        if kind == "seq_aux_loss":
            shares = counts / (k * s)
        loss = count * sum((share * probabilities[:, j].mean(0)).sum() for j, share in enumerate(shares)) / b
        auxiliary = auxiliary + coefficient * loss
    return out, auxiliary, kept


def in_groups(config: TransformerConfig, scores: list[float]) -> list[int]:
    """Return the numbers of the experts in the best groups for a token, or all expert numbers if routing does not use
    groups."""
    groups, best, k = config.moe_router_num_groups, config.moe_router_group_topk, config.moe_router_topk
    if groups is None or best is None:
        return list(range(len(scores)))
    each = len(scores) // groups
    members = [list(range(group * each, (group + 1) * each)) for group in range(groups)]
    summed = config.moe_router_group_score_topk or k // best
    value = [sum(sorted((scores[e] for e in group), reverse=True)[:summed]) for group in members]
    return [e for group in sorted(range(groups), key=lambda g: (-value[g], g))[:best] for e in members[group]]


def sparse_mixture(config: TransformerConfig, logits: Tensor, best: list[int]) -> dict[int, Tensor]:
    """Return the weight of each chosen expert for a token with logits [E]. The weight of an expert is its share of a
    softmax over the experts that have similar logits and were not chosen before it."""
    left, found, eps = list(range(len(logits))), {}, named_value(run_of(config), "moe_sparsemixer_eps")
    for e in best:
        top = logits[e].item()
        distance = {o: (top - logits[o].item()) / max(abs(logits[o].item()), top) for o in left}
        near = [o for o in left if distance[o] <= 2 * eps]
        found[e] = logits[e].exp() / sum(logits[o].exp() for o in near)
        left.remove(e)
    return found


def sinkhorn_matrix(logits: Tensor) -> Tensor:
    """Return the Sinkhorn matrix for the logits [s, E] of one sequence: start with exp(logits), and alternately divide
    rows and columns by their sums."""
    matrix = logits.exp()
    for _ in range(16):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True)
    return matrix


def mlp(config: TransformerConfig, part: nn.Module, x: Tensor, expert: int | None = None) -> Tensor:
    """Compute the MLP of an expert or of the shared expert, including biases if there are any."""
    swiglu = FusedActivation("swiglu", False)
    functions = {"swiglu": swiglu, "gelu": F.gelu, "squared_relu": squared_relu, "quick_geglu": gated_by_quick_gelu}
    for linear, function in ((part.linear_fc1, functions[config.activation]), (part.linear_fc2, lambda y: y)):
        weight, bias = (p if p is None or expert is None else p[expert] for p in (linear.weight, linear.bias))
        x = function(F.linear(x, weight.reshape(-1, x.shape[-1]), None if bias is None else bias.flatten()))
    return x


def gated_by_quick_gelu(x: Tensor) -> Tensor:
    """Apply the gated activation of gpt-oss, which clamps both halves and adds an offset of 1 to the up projection."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
    return (up + 1) * gate * (gate * 1.702).sigmoid()
