"""Rules of context and sequence parallelism: divisibility of the sequence length and of heads."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.attention.partition import sequence_divisor
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.rules.model import window_heads
from megatron.training.config.run_config import RunConfig


def sequence(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """The sequence length must be divisible for context and sequence parallelism together."""
    p, s = c.parallel, c.model.seq_length
    cp, tp = p.context_parallel_size, p.tensor_model_parallel_size
    if cp < 1 or tp < 1:
        return
    divisor = sequence_divisor(cp, tp, p.sequence_parallel)
    if divides(divisor, s):
        return
    if cp == 1:
        rule = f"must be a multiple of --tensor-model-parallel-size {tp} under --sequence-parallel"
    elif not p.sequence_parallel:
        rule = f"must be a multiple of 2 * --context-parallel-size {cp} = {divisor}"
    else:
        rule = (
            f"must be a multiple of 2 * --context-parallel-size {cp} and, under --sequence-parallel, "
            f"of --context-parallel-size {cp} * --tensor-model-parallel-size {tp}: of {divisor}"
        )
    yield Problem("--seq-length", s, rule, multiples(s, divisor))


def heads_over_context(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """With a2a, the context ranks share the heads of a tensor-parallel rank."""
    m, p = c.model, c.parallel
    cp, tp = p.context_parallel_size, p.tensor_model_parallel_size
    if p.cp_comm_type != "a2a" or cp <= 1 or tp < 1:
        return
    rule = f"must be a multiple of --tensor-model-parallel-size {tp} * --context-parallel-size {cp} = {tp * cp} for a2a"
    flags = [("--num-attention-heads", m.num_attention_heads)]
    if m.group_query_attention:
        flags.append(("--num-query-groups", m.num_query_groups or 0))
    flags += [(flag, value) for flag, value in window_heads(c).items() if value is not None]
    for flag, value in flags:
        if not divides(tp * cp, value):
            yield Problem(flag, value, rule, f"{multiples(value, tp * cp)}, or use --cp-comm-type p2p or all_gather")
