"""Registers upcycling, and defines its flags and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.config.model import TransformerConfig
from megatron.training.config.flags import named_value
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

SWITCH = "--moe-use-upcycling"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(UpcyclingFlags)
    m, options = config.model, config.checkpoint
    if not own.moe_use_upcycling or m.num_experts is None:
        return
    if options.load is None:
        yield Problem(SWITCH, None, "starts from a dense model", "add --load with the folder of the model")
    elif options.save == options.load:
        rule = "is the folder of the dense model in --load, but checkpoints of this run contain a different model"
        yield Problem("--save", options.save, rule, "use a different folder")
    yield from _divided(m, own.moe_upcycling_granularity)
    for flag_name, value, given, why in _different(config):
        if given:
            rule = f"cannot be combined with {SWITCH}: {why}, unlike in the dense model"
            yield Problem(flag_name, value, rule, "remove one of them")


@extension_flags("upcycling", may_change=True, rules=rules)
@dataclass(frozen=True)
class UpcyclingFlags:
    """Experts that start as copies of the MLPs of a dense model (arXiv 2212.05055, arXiv 2410.07524)."""

    moe_use_upcycling: bool = flag(
        False,
        needs="--num-experts; add --num-experts with the number of experts that replace each MLP",
    )
    """Start from the dense model in --load. Each expert starts as a copy of the layer's MLP, so that the model has the
    same outputs as the dense model until the first step. Routers are initialized at random."""

    moe_upcycling_granularity: int = flag(1, above=0, no_effect_without=SWITCH)
    """Divide each MLP into this many experts of equal width. The experts made from one MLP start with equal router
    weights, so that each token is sent to all or none of these experts."""

    moe_upcycling_noise: float = flag(0.0, at_least=0, no_effect_without=SWITCH)
    """Factor of the random weights that are added to the weights of each expert. If the factor is 0, all experts made
    from the same part of an MLP are equal at the start."""

    def changes_model(self) -> Collection[str]:
        """Return the configuration fields in which this run's model may differ from the model in --load; see
        `ChangesModel`."""
        return ("num_experts",) if self.moe_use_upcycling else ()


def _divided(m: TransformerConfig, granularity: int) -> Iterator[Problem]:
    """Check that each MLP can be divided into `granularity` experts, and that each token can be sent to all of these
    experts."""
    name = "--moe-upcycling-granularity"
    assert m.num_experts is not None
    for flag_name, value in (("--num-experts", m.num_experts), ("--moe-router-topk", m.moe_router_topk)):
        if value % granularity:
            nearest = max(1, round(value / granularity)) * granularity
            yield Problem(flag_name, value, f"must be a multiple of {name} {granularity}", f"nearest: {nearest}")
    if m.moe_ffn_size * granularity != m.ffn_size:
        rule = f"must be the width {m.ffn_size} of the dense MLP divided by {name} {granularity}"
        width, rest = divmod(m.ffn_size, granularity)
        remedy = f"--moe-upcycling-granularity must divide {m.ffn_size}" if rest else f"nearest: {width}"
        yield Problem("--moe-ffn-hidden-size", m.moe_ffn_size, rule, remedy)


def _different(config: RunConfig) -> Iterator[tuple[str, object, bool, str]]:
    """Yield settings of the router that may make the outputs of the MoE model differ from the outputs of the dense
    model, although each expert is a copy of an MLP. Each setting is a tuple of the flag, the value of the flag, whether
    the setting is used in this run, and the effect on the outputs of experts."""
    m, scores = config.model, config.model.moe_router_scores
    unequal = "the weights of a token's experts do not sum to a constant"
    own = scores in ("sigmoid", "sqrtsoftplus")
    divided = own and m.moe_router_topk_normalization and m.moe_router_topk > 1
    every = scores == "pre_softmax" and m.moe_router_topk == m.moe_choices
    yield "--moe-router-pre-softmax", None, scores == "pre_softmax" and not every, unequal
    yield "--moe-router-score-function", scores, scores not in ("softmax", "pre_softmax") and not divided, unequal
    epsilon = m.moe_router_topk_epsilon
    yield "--moe-router-topk-epsilon", epsilon, divided and epsilon > 1e-9, unequal
    types = m.moe_router_load_balancing_type
    yield "--moe-router-load-balancing-type", types, "sinkhorn" in types, unequal
    hashed = named_value(config, "moe_n_hash_layers") or 0
    yield "--moe-n-hash-layers", hashed, hashed > 0, "a table selects experts at random instead of all parts of one MLP"
    shared = m.moe_shared_expert_intermediate_size
    yield "--moe-shared-expert-intermediate-size", shared, bool(shared), "the output of another MLP is added"
    yield "--moe-latent-size", m.moe_latent_size, bool(m.moe_latent_size), "experts read a projection of hidden states"
    yield "--moe-zero-experts", m.moe_zero_experts, bool(m.moe_zero_experts), "some experts compute nothing"
    yield (
        "--moe-apply-probs-on-input",
        None,
        m.moe_apply_probs_on_input,
        "weights are applied before the activation function",
    )
    yield "--moe-output-norm", None, m.moe_output_norm, "the sum of outputs is normalized"
    parts, groups = config.options(UpcyclingFlags).moe_upcycling_granularity, m.moe_router_num_groups
    cut = bool(groups) and m.moe_choices // (groups or 1) % parts != 0
    yield "--moe-router-num-groups", groups, cut, "a group of experts contains only some parts of an MLP"
    forced = bool(named_value(config, "moe_router_force_load_balancing")) and parts > 1
    yield "--moe-router-force-load-balancing", None, forced, "random scores choose only some parts of an MLP"


CALLBACKS.register(
    "upcycling",
    f"{__package__}.dense_start:DenseStart",
    when=lambda c: c.options(UpcyclingFlags).moe_use_upcycling,
)
