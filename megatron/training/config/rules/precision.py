"""Rules of number formats: fp16, bf16, fp32 and fp64, and alignments that formats of products ask for."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import LINEAR_FORMATS, linear_format
from megatron.training.config.problem import Problem, multiples
from megatron.training.config.run_config import RunConfig


def precision(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p, o = c.parallel, c.optimizer
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp32", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield Problem.exclusive(chosen[0], None, " and ".join(chosen[1:]))
    if o.min_loss_scale > o.initial_loss_scale:
        rule = f"must be at most --initial-loss-scale {o.initial_loss_scale:g}"
        yield Problem("--min-loss-scale", o.min_loss_scale, rule, f"nearest: {o.initial_loss_scale:g}")
    if p.cpu and p.distributed_backend == "nccl":
        yield Problem("--distributed-backend", "nccl", "cannot be combined with --cpu", "use gloo, or remove --cpu")


def tokens_for_latents(c: RunConfig) -> Iterator[Problem]:
    """A rank's tokens that a replicated layer projects to latents, of attention or of experts, must be aligned."""
    m, p = c.model, c.parallel
    tp = p.tensor_model_parallel_size
    name = linear_format(p)
    if name is not None and p.sequence_parallel and tp > 1 and p.context_parallel_size > 0:
        alignment, under = LINEAR_FORMATS.facts(name).alignment(p, tp)
        tokens = m.seq_length // p.context_parallel_size // tp * c.training.micro_batch_size
        if tokens % alignment:
            each = (
                f"gives a rank {tokens} tokens of a micro-batch to project to latents, which must be a multiple of "
                f"{alignment} under {under}"
            )
            near = multiples(m.seq_length, alignment * p.context_parallel_size * tp)
            yield Problem("--seq-length", m.seq_length, each, f"{near}, or another --micro-batch-size")
