"""Rules of gated delta nets. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from megatron.core.parts import LINEAR_FORMATS, linear_format
from megatron.extensions.linear_attention.flags import LinearAttentionFlags
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig


def delta_nets(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with gated delta nets."""
    own, p = c.options(LinearAttentionFlags), c.parallel
    keys, values = own.linear_num_key_heads, own.linear_num_value_heads
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    if keys > 0 and not divides(keys, values):
        rule = f"must be a multiple of --linear-num-key-heads {keys}"
        yield Problem("--linear-num-value-heads", values, rule, multiples(values, keys))
    if not divides(tp * cp, keys):
        rule, near = f"must be a multiple of --tensor-model-parallel-size {tp}", multiples(keys, tp * cp)
        if cp > 1:
            rule = f"{rule} * --context-parallel-size {cp} = {tp * cp}, as these ranks share its heads"
            near = f"{near}, or lower --context-parallel-size"
        yield Problem("--linear-num-key-heads", keys, rule, near)
    if (name := linear_format(p)) is not None and tp >= 1 and keys >= 1 and keys % tp == 0:
        yield from _aligned(c, *LINEAR_FORMATS.facts(name).alignment(p, tp))


def _aligned(c: RunConfig, alignment: int, under: str) -> Iterator[Problem]:
    """Each rank's matrices in another format must have aligned dimensions."""
    own, tp = c.options(LinearAttentionFlags), c.parallel.tensor_model_parallel_size
    keys = own.linear_num_key_heads
    values, width, step = own.linear_num_value_heads // tp, own.linear_value_head_dim, alignment * tp
    rule = f"under {under}, a rank's {{}} must be a multiple of {alignment}"
    if values * width % alignment:
        near = multiples(width, alignment // gcd(alignment, values))
        yield Problem("--linear-value-head-dim", width, rule.format(f"{values} value heads"), near)
    rows = keys // tp * sum(own.linear_channels)
    if rows % alignment:
        near = multiples(keys, lcm(step // gcd(step, sum(own.linear_channels)), tp))
        yield Problem("--linear-num-key-heads", keys, rule.format(f"{rows} rows of the projection"), near)
