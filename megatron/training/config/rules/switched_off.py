"""Parallelism that a configuration asks for and has no use for: it is turned off, as Megatron-LM does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def switched_off(c: RunConfig) -> Iterator[tuple[str, Any, Problem]]:
    """(field of ModelParallelConfig, the value it gets, what is said)."""
    p = c.parallel
    for field in ("sequence_parallel", "tp_comm_overlap") if p.tensor_model_parallel_size == 1 else ():
        if getattr(p, field):
            flag, needed = "--" + field.replace("_", "-"), "--tensor-model-parallel-size above 1"
            yield field, False, Problem.no_effect(flag, None, needed)
    if c.model.num_experts is None:
        for field, off in (("expert_model_parallel_size", 1), ("expert_tensor_parallel_size", None)):
            value = getattr(p, field)
            if value not in (off, 1):
                flag = "--" + field.replace("_", "-")
                yield field, off, Problem.no_effect(flag, value, "--num-experts")
