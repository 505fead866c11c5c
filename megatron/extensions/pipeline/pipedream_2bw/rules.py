"""Flag rules of the schedule PipeDream-2BW. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizers import STATE_STORES
from megatron.core.pipeline_parallel.stages import has_tied_stages
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS
from megatron.training.config.batch_size import legal_sizes
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.step_parts import STEP_PARTS, launches_once

NAME = "2bw"
SCHEDULE = "--pipeline-schedule"


def two_versions(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report features that the 2bw schedule does not support, because this schedule delays updates and keeps two
    versions of the weights."""
    for other, why in _excluded(c):
        yield Problem.exclusive(SCHEDULE, NAME, other, why)
    if size := c.parallel.loss_chunk_tokens:
        rule = f"adds gradients in forward passes, but with {NAME}, a step begins before the previous step ends"
        yield Problem("--loss-chunk-tokens", size, rule, "remove one of them")
    yield from _microbatches(c)
    yield from _no_use(c)


def _excluded(c: RunConfig) -> Iterator[tuple[str, str]]:
    m = c.model
    p = c.parallel
    o = c.optimizer
    if p.fp16:
        yield "--fp16", "a step begins before its loss scale is known"
    if list(LINEAR_FORMATS.wanted(p)):
        yield "--fp8-format", "fp8 copies of weights exist for only one weight version"
    if launches_once(c):
        yield "--cuda-graph-impl", "a CUDA graph always uses the same weight version"
    if p.activation_store is not None:
        yield "--cpu-offloading", "it requires that each step ends before the next step begins"
    if c.ddp.shards_gradients:
        yield (
            f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}",
            "weights do not stay in memory",
        )
    if o.host_fraction:
        yield "--optimizer-cpu-offload", "optimizer states in host memory are always updated at the end of a step"
    if o.updates_together:
        yield f"--optimizer {o.optimizer}", "performing this optimizer's updates during the next step is untested"
    if [name for name in STATE_STORES if STATE_STORES.facts(name).holds(o)][1:-1] or o.state_store != "two versions":
        yield "--use-precision-aware-optimizer", "main parameters must be stored at full precision"
    if sum(STEP_PARTS.facts(name).kept is not None for name in STEP_PARTS.wanted(c)) > 1:
        yield "--optimizer-post-validation", "updates always wait for the gradient norm and are never rolled back"
    yield from _of_experts(m)


def _of_experts(m: TransformerConfig) -> Iterator[tuple[str, str]]:
    if m.num_experts is None:
        return
    if m.moe_router_enable_expert_bias:
        yield "--moe-router-enable-expert-bias", "expert biases exist in only one version"
    if m.moe_balancing_coeff("aux_loss", "global_aux_loss"):
        kinds = " ".join(m.moe_router_load_balancing_type)
        yield (
            f"--moe-router-load-balancing-type {kinds}",
            "it sums expert loads over a step, but two steps may be in progress at the same time; use seq_aux_loss",
        )


def _microbatches(c: RunConfig) -> Iterator[Problem]:
    """Check that the number of micro-batches per step is at least the number of pipeline ranks. This is required
    because each update is used two steps later (arXiv 2006.09503, section 3.1)."""
    pp, sizes = c.parallel.pipeline_model_parallel_size, legal_sizes(c)
    per_pass = c.training.micro_batch_size * (c.parallel.data_parallel_size or 1)
    smallest = min([sizes.final, *(size for _, size in sizes.earlier)])
    if per_pass > 0 and smallest % per_pass == 0 and smallest // per_pass < pp:
        own = f"gives {smallest // per_pass} micro-batches per step"
        rule = f"{own}, but {SCHEDULE} {NAME} needs at least {pp}, the number of pipeline ranks"
        yield Problem("--global-batch-size", smallest, rule, f"nearest: {pp * per_pass}")


def _no_use(c: RunConfig) -> Iterator[Problem]:
    """Warn about configurations in which ranks still wait for each other between steps."""
    if c.parallel.pipeline_model_parallel_size == 1:
        return
    if c.logging.log_interval == 1:
        rule = "drains the pipeline after every step, because --log-interval 1 waits for each step's loss and norm"
        yield Problem(SCHEDULE, NAME, rule, "raise --log-interval", harmless=True)
        return
    if has_tied_stages(c.model, c.parallel):
        rule = "has a bubble, because the embedding gradients are summed over the first and the last rank"
        yield Problem(SCHEDULE, NAME, rule, "use --untie-embeddings-and-output-weights", harmless=True)
