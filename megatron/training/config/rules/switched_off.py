"""Parallelism and experts that a configuration asks for and has no use for: they are turned off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def switched_off(c: RunConfig) -> Iterator[tuple[str, str, Any, Problem]]:
    """(section, its field, the value it gets, what is said)."""
    p = c.parallel
    if single_expert := _is_dense(c):
        rule, remedy = "one expert that all tokens take is a dense MLP", "remove it to say so"
        yield "model", "num_experts", None, Problem("--num-experts", 1, rule, remedy, harmless=True)
    for field in ("sequence_parallel", "tp_comm_overlap") if p.tensor_model_parallel_size == 1 else ():
        if getattr(p, field):
            flag, needed = "--" + field.replace("_", "-"), "--tensor-model-parallel-size above 1"
            yield "parallel", field, False, Problem.no_effect(flag, None, needed)
    if c.model.num_experts is None or single_expert:
        for field, off in (("expert_model_parallel_size", 1), ("expert_tensor_parallel_size", None)):
            value = getattr(p, field)
            if value not in (off, 1):
                flag = "--" + field.replace("_", "-")
                yield "parallel", field, off, Problem.no_effect(flag, value, "--num-experts")


def _is_dense(c: RunConfig) -> bool:
    """Whether the only expert of each layer computes what a dense MLP does: its weight is 1, the softmax of one logit.
    Megatron-DeepSpeed's dense models are written so."""
    m = c.model
    own = m.moe_ffn_hidden_size not in (None, m.ffn_hidden_size) or m.moe_shared_expert_intermediate_size is not None
    weighted = "softmax" not in m.moe_router_scores or m.moe_router_topk_scaling_factor not in (None, 1.0)
    drops = any(
        factor is not None and factor < 1 for factor in (m.moe_expert_capacity_factor, m.moe_eval_capacity_factor)
    )
    return m.num_experts == 1 and not own and not weighted and not drops
