"""Flag rules of optimizer post-validation. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.stages import has_tied_stages
from megatron.extensions.pipeline.post_validation.flags import PostValidationFlags
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

SWITCH = "--optimizer-post-validation"

WAIT_FOR_RANK_0 = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Schedules in which rank 0 runs both the last pass of a step and the first pass of the next step. With these
schedules, --optimizer-post-validation saves no time."""


def without_use(c: RunConfig) -> RunConfig:
    """Return a configuration in which --optimizer-post-validation is disabled if no update can be performed early. The
    rule `post_validation` reports that the flag has no effect."""
    idle = c.parallel.pipeline_model_parallel_size == 1 or c.logging.log_interval == 1
    return c.with_options(PostValidationFlags()) if idle else c


def post_validation(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report features that post-validation does not support, and configurations in which it has no effect or saves no
    time."""
    if c.parallel.pipeline_model_parallel_size == 1:
        yield Problem.no_effect(SWITCH, None, "--pipeline-model-parallel-size above 1")
        return
    if size := c.parallel.loss_chunk_tokens:
        rule = "adds gradients in forward passes, but with post-validation, steps begin before the previous step ends"
        yield Problem("--loss-chunk-tokens", size, rule, "remove one of them")
    if c.logging.log_interval == 1:
        rule = "has no effect with --log-interval 1, which reads the gradient norm after every step"
        yield Problem(SWITCH, None, rule, "raise --log-interval, or remove the flag", harmless=True)
        return
    strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
    if c.ddp.shards_gradients:
        yield Problem.exclusive(SWITCH, None, strategy, "gradients of sharded units are freed before the norm is known")
    schedule = c.parallel.schedule
    if schedule in WAIT_FOR_RANK_0:
        rule = (
            f"saves no time with --pipeline-schedule {schedule}, because rank 0 ends each step and begins the next "
            "one, but needs memory for copies of states"
        )
        yield Problem(SWITCH, None, rule, f"use zb-h2 or zb-v, or remove {SWITCH}", harmless=True)
        return
    if has_tied_stages(c.model, c.parallel):
        rule = "saves no time, because the embedding gradients are summed over the first and the last rank"
        remedy = "use --pipeline-schedule zb-v, which puts the first and the last stage on one rank"
        if not c.model.mtp_depths:
            remedy += ", or --untie-embeddings-and-output-weights"
        yield Problem(SWITCH, None, rule, remedy, harmless=True)
