"""Registers additional routing methods, and defines their flags and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import ROUTERS, MoEConfig
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.model.num_experts is None:
        return
    if balances_choices(config.model):
        yield from _sinkhorn(config.model)
    elif config.model.moe_router_score_function == "sparsemixer":
        yield from _sparsemixer(config.model)


@extension_flags("routing", part_of="model", rules=rules, always=True)
@dataclass(frozen=True)
class RoutingFlags:
    """Options for additional routing methods."""

    NO_EFFECT_WITHOUT: ClassVar = "--num-experts"

    moe_sparsemixer_eps: float = flag(0.01, at_least=0, no_effect_without="--moe-router-score-function sparsemixer")
    """Threshold of sparsemixer routing. A logit s counts as near the largest logit m if (m - s) / max(|s|, m) is at
    most twice the threshold."""

    moe_router_force_load_balancing: bool = flag(False, training_only=True)
    """Replace router logits with random numbers in training, for benchmarks with evenly loaded experts."""


def balances_choices(config: MoEConfig) -> bool:
    """Return True if the router uses Sinkhorn's algorithm, which balances the load of experts without an auxiliary
    loss."""
    return "sinkhorn" in config.moe_router_load_balancing_type


def sinkhorn_scores(config: MoEConfig) -> str | None:
    """Return the score function of Sinkhorn routing; None if Sinkhorn routing is not used."""
    if not balances_choices(config):
        return None
    return "sigmoid" if config.moe_router_topk == 1 else "pre_softmax"


def _sinkhorn(m: MoEConfig) -> Iterator[Problem]:
    """Check that no flags that balance the load of experts or set the router scores are combined with Sinkhorn
    routing."""
    sinkhorn = "--moe-router-load-balancing-type sinkhorn"
    if any(m.moe_aux_loss_coeff):
        yield Problem.exclusive("--moe-aux-loss-coeff", m.moe_aux_loss_coeff, sinkhorn, "it has no auxiliary loss")
    if m.moe_router_enable_expert_bias:
        yield Problem.exclusive("--moe-router-enable-expert-bias", None, sinkhorn, "both bias the choice of experts")
    one = m.moe_router_topk == 1
    scores = "the sigmoid of the chosen expert's logit" if one else "the softmax over all experts"
    rule = f"has no effect with {sinkhorn}, whose weights are {scores}"
    if m.moe_router_score_function not in ("softmax", m.moe_router_scores):
        yield Problem("--moe-router-score-function", m.moe_router_score_function, rule, "remove it", harmless=True)
    if m.moe_router_pre_softmax and one:
        yield Problem("--moe-router-pre-softmax", None, rule, "remove it", harmless=True)
    if m.moe_router_group_topk is not None and m.moe_router_num_groups is not None:
        why = "it balances over all experts"
        yield Problem.exclusive("--moe-router-group-topk", m.moe_router_group_topk, sinkhorn, why)


def _sparsemixer(m: MoEConfig) -> Iterator[Problem]:
    scores, why = "--moe-router-score-function sparsemixer", "it needs the experts with the largest logits"
    if m.moe_router_enable_expert_bias:
        yield Problem.exclusive("--moe-router-enable-expert-bias", None, scores, why)
    if m.moe_router_group_topk is not None:
        yield Problem.exclusive("--moe-router-group-topk", m.moe_router_group_topk, scores, why)


def _is_special(config: TransformerConfig, number: int) -> bool:
    return balances_choices(config) or config.options(RoutingFlags).moe_router_force_load_balancing


ROUTERS.register(
    "special",
    f"{__package__}.routers:SpecialRouter",
    when=_is_special,
    scores=("sparsemixer",),
    balancings=("sinkhorn",),
    fixed_scores=sinkhorn_scores,
    training_only=True,
)
