"""Rules of --no-fusions. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    backend = c.parallel.attention_backend
    if backend in ("flash3", "cudnn", "triton"):
        rule = "has no effect beside --no-fusions: kernels of torch compute attention"
        yield Problem("--attention-backend", backend, rule, "remove one of them", harmless=True)
