"""Rules of optimizers that update whole matrices (Muon)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import OPTIMIZERS
from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def optimizer(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o, table = c.optimizer, field_table()
    elementwise = [name for name in OPTIMIZERS if not OPTIMIZERS.facts(name).whole_matrices]
    if o.muon_scalar_optimizer not in elementwise:
        rule = "updates whole matrices, which embeddings, norms and biases are not"
        yield Problem("--muon-scalar-optimizer", o.muon_scalar_optimizer, rule, f"use {' or '.join(elementwise)}")
    for name in (name for name in vars(o) if name.startswith("muon_") or name == "moe_router_skip_muon"):
        flag, value = table[name], getattr(o, name)
        if value != flag.default and o.optimizer in elementwise:
            yield Problem.no_effect(flag.name, None if isinstance(value, bool) else value, "--optimizer muon")
    if o.moe_router_skip_muon and c.model.num_experts is None:
        yield Problem.no_effect("--moe-router-skip-muon", None, "--num-experts")
