"""Rules of the distributed optimizer, and of updates ahead of the gradient norm (--optimizer-post-validation)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def unsharded_by(c: RunConfig) -> tuple[str, str]:
    """The flag that turns the distributed optimizer off, and what to do instead."""
    if c.ddp.data_parallel_sharding_strategy == "no_shard":
        flag = "--data-parallel-sharding-strategy"
        return f"{flag} no_shard", f"use {flag} optim"
    return "--no-use-distributed-optimizer", "remove --no-use-distributed-optimizer"


WAIT_FOR_RANK_0 = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Schedules whose steps end on the rank that begins the next one, with or without --optimizer-post-validation."""


def post_validation(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """A step is rolled back from copies of what an update changes, and the forward passes behind it are run again."""
    o, switch = c.optimizer, "--optimizer-post-validation"
    if not o.optimizer_post_validation:
        return
    strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
    if c.ddp.shards_gradients:
        yield Problem.exclusive(switch, None, strategy, "gradients of units are not kept until the norm is known")
    schedule = c.parallel.schedule
    if schedule in WAIT_FOR_RANK_0:
        rule = (
            f"saves no time with --pipeline-schedule {schedule}, whose steps end on the rank that begins the next one, "
            "and keeps copies of states"
        )
        yield Problem(switch, None, rule, f"use zb-h2 or zb-v, or remove {switch}", harmless=True)
        return
    try:
        tied = tied_stages(c.model, pipeline_layout(c.model, c.parallel))
    except (ArithmeticError, ValueError):
        return  # sizes that do not fit: other rules say which
    if tied:
        rule = "saves no time: the embedding on the first and on the last rank sums up its gradients over both"
        remedy = "use --pipeline-schedule zb-v, which has both on one rank"
        if not c.model.mtp_depths:
            remedy += ", or --untie-embeddings-and-output-weights"
        yield Problem(switch, None, rule, remedy, harmless=True)
