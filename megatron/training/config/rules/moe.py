"""Rules for mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.moe import BALANCING_LOSSES, MoEConfig
from megatron.training.config.problem import (
    Problem,
    divides,
    multiples,
    nearest_divisor,
    unless_at_most,
    unless_multiple,
)
from megatron.training.config.run_config import RunConfig


def experts(c: RunConfig, world_size: int) -> Iterator[Problem]:
    if c.model.num_experts is None:
        return
    m, p = c.model, c.parallel
    if m.num_experts is not None and m.num_experts > 0:
        yield from unless_at_most("--moe-router-topk", m.moe_router_topk, "--num-experts", m.num_experts)
    try:
        if m.pattern is None and m.num_layers > 0 and not m.moe_layers:
            remedy = "use another pattern, or remove --num-experts"
            yield Problem("--moe-layer-freq", m.moe_layer_freq, "selects no layer, so no layer has experts", remedy)
    except ValueError as error:
        yield Problem("--moe-layer-freq", m.moe_layer_freq, str(error), "use for example 1, 2 or ([0]*1+[1]*3)")
    if p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        rule = "needs --sequence-parallel with TP, so that each rank routes its own tokens"
        yield Problem("--num-experts", m.num_experts, rule, "add --sequence-parallel")
    yield from _expert_parallel(c, world_size)
    yield from _grouped(c)
    yield from _router(c)


def _expert_parallel(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, p = c.model, c.parallel
    ep, etp = p.expert_model_parallel_size, p.expert_tp
    yield from unless_multiple("--num-experts", m.num_experts, "--expert-model-parallel-size", ep)
    if m.hidden_size > 0:
        yield from unless_multiple("--moe-ffn-hidden-size", m.moe_ffn_size, "--expert-tensor-parallel-size", etp)
    if m.add_bias_linear and not divides(etp, m.expert_io_size):
        rule = f"must be a multiple of --expert-tensor-parallel-size {etp}, because the biases of experts are sharded"
        remedy = f"{multiples(m.expert_io_size, etp)}, or add --disable-bias-linear"
        flag = "--hidden-size" if m.moe_latent_size is None else "--moe-latent-size"
        yield Problem(flag, m.expert_io_size, rule, remedy)
    shared, tp = m.moe_shared_expert_intermediate_size, p.tensor_model_parallel_size
    yield from unless_multiple("--moe-shared-expert-intermediate-size", shared, "--tensor-model-parallel-size", tp)
    pp = p.pipeline_model_parallel_size
    stage = world_size // pp if pp > 0 and world_size % pp == 0 else 0
    if stage and ep > 0 and etp > 0 and stage % (ep * etp):
        rule = f"times --expert-tensor-parallel-size {etp} must divide the {stage} ranks of a pipeline stage"
        divided = stage % ep == 0  # the sizes would fit without --expert-tensor-parallel-size
        remedy = "use --expert-tensor-parallel-size 1" if divided or stage % etp else ""
        if stage % etp == 0:
            remedy = ", or ".join(filter(None, [f"nearest: {nearest_divisor(stage // etp, ep)}", remedy]))
        yield Problem("--expert-model-parallel-size", ep, rule, remedy)


ROW_BYTES = 16
"""Grouped kernels require matrices whose row size in bytes is a multiple of this number."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def _grouped(c: RunConfig) -> Iterator[Problem]:
    """Report that --moe-grouped-gemm has no effect, if there is no grouped kernel for the given flags on any GPU.

    When the run starts, `megatron.core.moe.grouped_gemms.has_grouped_kernel` checks whether the present GPU has a
    grouped kernel.
    """
    m = c.model
    p = c.parallel
    flag = "--moe-grouped-gemm"
    if not m.moe_grouped_gemm or p.expert_tp < 1:
        return
    dtype = p.params_dtype
    if dtype == "float64" or (dtype != "bfloat16" and not p.cpu):
        where = "" if dtype == "float64" else " of GPUs"
        rule = f"has no effect in {dtype}, in which no grouped kernel{where} computes"
        yield Problem(flag, None, rule, f"use --bf16, or remove {flag}", harmless=True)
        return
    step = ROW_BYTES // ITEM_BYTES[dtype]
    io = "--hidden-size" if m.moe_latent_size is None else "--moe-latent-size"
    for name, width, ranks in (("--moe-ffn-hidden-size", m.moe_ffn_size, p.expert_tp), (io, m.expert_io_size, 1)):
        if width > 0 and width % (step * ranks):
            each = f" / --expert-tensor-parallel-size {ranks}" if ranks > 1 else ""
            rule = f"has no effect with {name} {width}: grouped kernels need {name}{each} to be a multiple of {step}"
            remedy = f"{multiples(width, step * ranks)}, or remove {flag}"
            yield Problem(flag, None, rule, remedy, harmless=True)
            return


def _router(c: RunConfig) -> Iterator[Problem]:
    m = c.model
    if m.moe_router_topk == 1 and m.moe_router_scores == "softmax":
        rule = "the softmax over one expert is always 1, so the router receives no gradient"
        yield Problem("--moe-router-topk", 1, rule, "use 2 or more, or add --moe-router-pre-softmax")
    yield from expert_groups(m)
    types, coefficients = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    if any(coefficients) and types == ("none",):
        none = "--moe-router-load-balancing-type none"
        yield Problem.exclusive("--moe-aux-loss-coeff", coefficients, none)
    if len(types) > 1 and (alone := [kind for kind in types if kind not in BALANCING_LOSSES]):
        yield Problem("--moe-router-load-balancing-type", types, f"{alone[0]} cannot be combined", "use it alone")
    elif len(types) != len(coefficients):
        rule = f"must be as many as the {len(types)} of --moe-router-load-balancing-type {' '.join(types)}"
        yield Problem("--moe-aux-loss-coeff", coefficients, rule, "give one for each")


def expert_groups(m: MoEConfig) -> Iterator[Problem]:
    """Check the flags for routing each token to a limited number of expert groups."""
    groups = m.moe_router_num_groups
    best = m.moe_router_group_topk
    topk = m.moe_router_topk
    if groups is None or best is None:
        return
    if not divides(groups, m.num_experts):
        rule = f"must divide --num-experts {m.num_experts}"
        nearest = nearest_divisor(m.num_experts or 1, groups)
        yield Problem("--moe-router-num-groups", groups, rule, f"nearest: {nearest}")
        return
    if best > groups:
        rule = f"must be at most --moe-router-num-groups {groups}"
        yield Problem("--moe-router-group-topk", best, rule, f"nearest: {groups}")
    elif m.moe_router_group_score_topk is None and not divides(best, topk):
        rule = f"must be a multiple of --moe-router-group-topk {best}, the groups of a token"
        remedy = f"{multiples(topk, best)}, or add --moe-router-group-score-topk"
        yield Problem("--moe-router-topk", topk, rule, remedy)
    elif (summed := m.moe_router_group_score_topk) and m.num_experts and summed * groups > m.num_experts:
        rule = f"must be at most the {m.num_experts // groups} experts of a group"
        yield Problem("--moe-router-group-score-topk", summed, rule, f"nearest: {m.num_experts // groups}")
    elif m.num_experts and min(groups, best, topk) > 0 and topk > best * (m.num_experts // groups):
        each = m.num_experts // groups
        rule = f"must be at most the {best * each} experts of --moe-router-group-topk {best} groups of {each}"
        yield Problem("--moe-router-topk", topk, rule, f"nearest: {best * each}")
