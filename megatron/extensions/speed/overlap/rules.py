"""Validate the flags for communication overlap. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, runs_in_turns
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.speed.overlap.flags import OverlapFlags
from megatron.training.config.flags import named_value
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def overlap(c: RunConfig, world_size: int) -> Iterator[Problem]:
    yield from _method(c)
    yield from _in_turns(c)


def _method(c: RunConfig) -> Iterator[Problem]:
    p, method = c.parallel, c.options(OverlapFlags).tp_comm_overlap_method
    if method == "symmetric" and (p.cpu or p.distributed_backend == "gloo"):
        rule = "needs GPUs and nccl, but the run uses --cpu or gloo"
        yield Problem("--tp-comm-overlap-method", method, rule, "use ring, which runs on any device")


OVERLAP = "--overlap-moe-expert-parallel-comm"


def _in_turns(c: RunConfig) -> Iterator[Problem]:
    """Check that passes of two micro-batches can be interleaved."""
    m, p = c.model, c.parallel
    if m.num_experts is None or not c.options(OverlapFlags).overlap_moe_expert_parallel_comm:
        return
    if p.expert_model_parallel_size == 1:
        rule = "needs --expert-model-parallel-size above 1, because a single rank has no all-to-alls"
        yield Problem(OVERLAP, None, rule, "remove it")
    if m.moe_token_dispatcher_type != "alltoall":
        rule = f"cannot be combined with --moe-token-dispatcher-type {m.moe_token_dispatcher_type}"
        yield Problem(OVERLAP, None, rule, "use --moe-token-dispatcher-type alltoall")
    try:
        layout = pipeline_layout(m, p)
    except ValueError:  # another rule reports this error
        return
    if runs_in_turns(p.schedule, layout.pp, layout.chunks):
        if c.training.num_microbatches == 1 and named_value(c, "step_batch_size_schedule") is None:
            rule = "has no effect with one micro-batch per rank, since it interleaves passes of two micro-batches"
            yield Problem(OVERLAP, None, rule, f"raise --global-batch-size, or remove {OVERLAP}", harmless=True)
        return
    if p.schedule == "interleaved":
        rule = "needs several pipeline stages per rank with --pipeline-schedule interleaved"
        yield Problem(OVERLAP, None, rule, "use --num-virtual-stages-per-pipeline-rank 2")
        return
    usual = {name: PIPELINE_SCHEDULES.facts(name).chunks for name in PIPELINE_SCHEDULES}
    others = [name for name, chunks in usual.items() if runs_in_turns(name, layout.pp, chunks)]
    rule = f"needs independent forward and backward passes: not --pipeline-schedule {p.schedule}"
    yield Problem(
        OVERLAP,
        None,
        rule + (" on several pipeline ranks" if p.schedule == "1f1b" else ""),
        f"use one of: {', '.join(others)}",
    )
