"""Other ways of context parallelism, and the rule of a2a. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.attention.backends import CONTEXT_PARALLEL
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.rules.model import window_heads
from megatron.training.config.run_config import RunConfig


def heads_over_context(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """With a2a, the context ranks share the heads of a tensor-parallel rank."""
    m, p = c.model, c.parallel
    cp, tp = p.context_parallel_size, p.tensor_model_parallel_size
    if tp < 1:
        return
    rule = f"must be a multiple of --tensor-model-parallel-size {tp} * --context-parallel-size {cp} = {tp * cp} for a2a"
    flags = [("--num-attention-heads", m.num_attention_heads)]
    if m.group_query_attention:
        flags.append(("--num-query-groups", m.num_query_groups or 0))
    flags += [(flag, value) for flag, value in window_heads(c).items() if value is not None]
    for flag, value in flags:
        if not divides(tp * cp, value):
            yield Problem(flag, value, rule, f"{multiples(value, tp * cp)}, or use --cp-comm-type p2p or all_gather")


CONTEXT_PARALLEL.register("all_gather", f"{__package__}.attention:gathered_attention")
CONTEXT_PARALLEL.register("a2a", f"{__package__}.attention:ulysses_attention", by_heads=True, rules=heads_over_context)
