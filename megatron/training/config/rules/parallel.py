"""Rules for the world size, number formats, and the division of sequences and attention heads among ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.core.attention.backends import CONTEXT_PARALLEL
from megatron.core.attention.tiles import sequence_divisor
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.problem import Problem, divides, multiples, problems_of, unless_at_most
from megatron.training.config.run_config import RunConfig


def world(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p = c.parallel
    sizes = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size)
    if min(sizes) < 1:
        return
    model, shown = math.prod(sizes), "TP {} * PP {} * CP {}".format(*sizes)
    if world_size % model:
        launch = f"start {round(world_size / model) * model or model} ranks (torchrun --nproc-per-node, or srun)"
        remedy = f"{launch}, or lower the model-parallel sizes"
        yield Problem("world size", world_size, f"must be a multiple of {shown} = {model}", remedy)
        return
    replicas = world_size // model
    if p.data_parallel_size is not None and p.data_parallel_size != replicas:
        yield Problem(
            "--data-parallel-size",
            p.data_parallel_size,
            f"must be world size {world_size} / ({shown}) = {replicas}",
            f"remove it, or start {p.data_parallel_size * model} ranks",
        )


def sequence(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that the sequence length is divisible into the equal parts that context and sequence parallelism
    require."""
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


def context(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the requirements of --cp-comm-type."""
    rules = CONTEXT_PARALLEL.facts(c.parallel.cp_comm_type).rules if c.parallel.context_parallel_size > 1 else None
    if rules is not None:
        yield from problems_of(rules(c, world_size))


def precision(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p, o = c.parallel, c.optimizer
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp32", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield Problem.exclusive(chosen[0], None, " and ".join(chosen[1:]))
    yield from unless_at_most("--min-loss-scale", o.min_loss_scale, "--initial-loss-scale", o.initial_loss_scale)
    if p.cpu and p.distributed_backend == "nccl":
        yield Problem("--distributed-backend", "nccl", "cannot be combined with --cpu", "use gloo, or remove --cpu")


def tokens_for_latents(c: RunConfig) -> Iterator[Problem]:
    """Check that the number of tokens on each rank is a multiple of the alignment that the GEMM format requires. The
    rule is for linear layers that are replicated over tensor-parallel ranks, and that project to latents of attention
    or experts."""
    m, p = c.model, c.parallel
    tp = p.tensor_model_parallel_size
    name = linear_format(p)
    if name is not None and p.sequence_parallel and tp > 1 and p.context_parallel_size > 0:
        alignment, under = LINEAR_FORMATS.facts(name).alignment(p, tp)
        tokens = m.seq_length // p.context_parallel_size // tp * c.training.micro_batch_size
        if tokens % alignment:
            each = (
                f"gives each rank {tokens} tokens of a micro-batch to project to latents, but this number must be "
                f"a multiple of {alignment} under {under}"
            )
            near = multiples(m.seq_length, alignment * p.context_parallel_size * tp)
            yield Problem("--seq-length", m.seq_length, each, f"{near}, or another --micro-batch-size")
