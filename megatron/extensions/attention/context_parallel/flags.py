"""Registers all context-parallel communication methods except for the default method, and defines their flag rules.
This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megatron.core.attention.backends import CONTEXT_PARALLEL
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.rules.model import window_heads
from megatron.training.config.run_config import RunConfig


def heads_over_context(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the attention heads can be divided evenly between context-parallel ranks. The method a2a divides the
    heads of a tensor-parallel rank among all context-parallel ranks. The method a2a+p2p divides these heads among the
    ranks of one all-to-all group."""
    m, p = c.model, c.parallel
    cp, tp = p.ranks_by_heads, p.tensor_model_parallel_size
    if tp < 1:
        return
    of = "the first of --hierarchical-context-parallel-sizes" if p.nests_context else "--context-parallel-size"
    rule = f"must be a multiple of --tensor-model-parallel-size {tp} * {of} {cp} = {tp * cp} for {p.cp_comm_type}"
    flags = [("--num-attention-heads", m.num_attention_heads)]
    if m.group_query_attention:
        flags.append(("--num-query-groups", m.num_query_groups or 0))
    flags += [(flag, value) for flag, value in window_heads(c).items() if value is not None]
    for flag, value in flags:
        if not divides(tp * cp, value):
            yield Problem(flag, value, rule, f"{multiples(value, tp * cp)}, or use --cp-comm-type p2p or all_gather")


def nested_ranks(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that --hierarchical-context-parallel-sizes contains the two sizes that --cp-comm-type a2a+p2p needs."""
    cp, sizes = c.parallel.context_parallel_size, c.parallel.hierarchical_context_parallel_sizes
    flag, shown = "--hierarchical-context-parallel-sizes", " ".join(map(str, sizes or ()))
    if sizes is None:
        yield Problem("--cp-comm-type", "a2a+p2p", f"needs {flag}", f"add {flag} A B with A * B = {cp}")
    elif len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != cp:
        rule = f"must be two sizes whose product is --context-parallel-size {cp}"
        yield Problem(
            flag, shown, rule, "pass the number of ranks that exchange heads, then the number of ranks per ring"
        )
    else:
        yield from heads_over_context(c, world_size)


CONTEXT_PARALLEL.register("all_gather", f"{__package__}.attention:gathered_attention")
CONTEXT_PARALLEL.register("a2a", f"{__package__}.attention:ulysses_attention", by_heads=True, rules=heads_over_context)
CONTEXT_PARALLEL.register(
    "a2a+p2p", f"{__package__}.attention:nested_attention", by_heads=True, nested=True, rules=nested_ranks
)
