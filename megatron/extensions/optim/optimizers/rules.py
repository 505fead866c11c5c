"""Validation rules for Muon, QK-clip and the precision-aware optimizer. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.extensions.optim.optimizers.flags import SCALE_BLOCK, MuonFlags, PrecisionAwareFlags, QKClipFlags
from megatron.training.config.flags import field_table, named_value
from megatron.training.config.problem import Problem
from megatron.training.config.rules.pipeline import unsharded_by
from megatron.training.config.run_config import RunConfig


def muon(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o = c.options(MuonFlags)
    elementwise = [name for name in OPTIMIZERS if not OPTIMIZERS.facts(name).whole_roles(c.optimizer)]
    if o.muon_scalar_optimizer not in elementwise:
        rule = "updates only whole matrices, but must also support embeddings, norms and biases"
        yield Problem("--muon-scalar-optimizer", o.muon_scalar_optimizer, rule, f"use {' or '.join(elementwise)}")


def qk_clip(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o = c.options(QKClipFlags)
    m = c.model
    p = c.parallel
    switch = "--qk-clip"
    if not o.qk_clip:
        return
    if p.schedule in PIPELINE_SCHEDULES and not PIPELINE_SCHEDULES.facts(p.schedule).flushes:
        why = "it reads values that the passes of one step have recorded"
        yield Problem.exclusive("--pipeline-schedule", p.schedule, switch, why)
    if p.attention_backend not in ("auto", "unfused"):
        rule = f"does not return the largest logit of each head, which {switch} needs"
        yield Problem("--attention-backend", p.attention_backend, rule, "use unfused, or remove --attention-backend")
    if m.qk_layernorm and m.attention_facts.grouped:
        why = "norms of queries and keys cancel any scaling of their projections, and already bound the logits"
        yield Problem.exclusive(switch, None, "--qk-layernorm", why)


def with_max_logits(c: RunConfig) -> RunConfig:
    """Under --qk-clip, replace --attention-backend auto with unfused, which is the only backend that returns the
    largest logits."""
    if not c.options(QKClipFlags).qk_clip or c.parallel.attention_backend != "auto":
        return c
    return replace(c, parallel=replace(c.parallel, attention_backend="unfused"))


def precision_aware(c: RunConfig, world_size: int) -> Iterator[Problem]:
    o = c.options(PrecisionAwareFlags)
    p = c.parallel
    switch = "--use-precision-aware-optimizer"
    if not o.use_precision_aware_optimizer:
        return
    if c.optimizer.optimizer != "adam":
        rule = f"stores Adam's states, but --optimizer is {c.optimizer.optimizer}"
        yield Problem(switch, None, rule, "use --optimizer adam")
    if not c.optimizer.use_distributed_optimizer:
        off, remedy = unsharded_by(c)
        rule = f"cannot be combined with {off}: only the distributed optimizer stores states in these formats"
        yield Problem(switch, None, rule, f"remove {switch}, or {remedy}")
    wide = next((f"--{name}" for name in ("fp64", "fp32") if getattr(p, name)), "fp32, the default")
    if o.main_params_dtype == "fp16" and not (p.bf16 or p.fp16):
        rule = f"is the format of a copy of the parameters, which a run in {wide} does not keep"
        yield Problem("--main-params-dtype", "fp16", rule, "add --bf16, or remove --main-params-dtype")
    if o.main_grads_dtype == "bf16":
        if p.fp64:
            rule = "cannot be combined with --fp64: rounded sums depend on the micro-batches of each rank"
            yield Problem("--main-grads-dtype", "bf16", rule, "keep one of them")
        if c.ddp.shards_gradients:
            why = "a gradient shard sums the micro-batches of all ranks in fp32"
            strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
            yield Problem.exclusive("--main-grads-dtype", "bf16", strategy, why)
        if named_value(c, "cuda_graph_impl") == "local":
            why = "recorded steps sum gradients in fp32"
            yield Problem.exclusive("--main-grads-dtype", "bf16", "--cuda-graph-impl local", why)
    yield from _blocks_cut(c, world_size)


def _blocks_cut(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report a problem if tensor parallelism splits a scale block of fp8 states. Results are the same under all
    parallel layouts only if each shard consists of whole scale blocks.
    """
    o = c.options(PrecisionAwareFlags)
    m = c.model
    p = c.parallel
    flags = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(o, name) == "fp8"]
    sizes = {"tp": p.tensor_model_parallel_size, "expt_tp": p.expert_tensor_parallel_size or 1, "ep": 1}
    if not flags or not m.vocab_size or max(sizes.values()) == 1:
        return
    from megatron.core.pipeline_parallel.stage_parameters import (
        stage_metas,
    )  # imported here, because `stage_parameters` imports torch

    try:
        metas = stage_metas(m)
    except (ArithmeticError, AssertionError, ValueError):
        # Other flag rules report invalid sizes.
        return
    for meta in metas:
        for axis, dim in meta.sharded.items():
            run = meta.global_shape[dim] * prod(meta.global_shape[dim + 1 :])
            if sizes.get(axis, 1) > 1 and run % (sizes[axis] * SCALE_BLOCK):
                rule = (
                    f"scales blocks of {SCALE_BLOCK} elements, of which tensor parallelism over {sizes[axis]} ranks "
                    f"cuts those of {meta.name} {list(meta.global_shape)} along dimension {dim}"
                )
                flag = field_table()[flags[0]].name
                yield Problem(flag, "fp8", rule, "use bf16, or a smaller --tensor-model-parallel-size")
                return
