"""Rules of CUDA graphs, in the manner of `megatron.training.config.rules.model`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def graphs(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """A graph repeats what was recorded: the same kernels on the same memory. What the host decides from batch to
    batch, or waits for in between, cannot be in it."""
    p = c.parallel
    impl = p.cuda_graph_impl
    if impl == "none":
        if p.cuda_graph_warmup_steps != field_table()["cuda_graph_warmup_steps"].default:
            rule, remedy = "counts only with --cuda-graph-impl local", "add that, or leave it out"
            yield Problem("--cuda-graph-warmup-steps", p.cuda_graph_warmup_steps, rule, remedy)
        return
    name = "--cuda-graph-impl"
    if p.cpu:
        yield Problem(name, impl, "records the work of a GPU, and --cpu is given", "leave one of them out")
    for flag, size in (
        ("--tensor-model-parallel-size", p.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", p.pipeline_model_parallel_size),
        ("--context-parallel-size", p.context_parallel_size),
    ):
        if size > 1:
            yield _excluded(flag, size, impl, "ranks exchange data within a micro-batch, which is not recorded")
    for flag, value, given, why in (
        ("--num-experts", c.model.num_experts, c.model.num_experts, "shapes follow from where tokens go"),
        ("--reset-attention-mask", None, c.data.reset_attention_mask, "documents differ from sample to sample"),
        ("--overlap-grad-reduce", None, c.ddp.overlap_grad_reduce, "reductions start within a backward pass"),
        ("--overlap-param-gather", None, c.ddp.overlap_param_gather, "modules wait for parameters as they run"),
        ("--log-straggler", None, c.logging.log_straggler, "forward and backward are one, and not timed apart"),
    ):
        if given:
            yield _excluded(flag, value, impl, why)


def _excluded(flag: str, value: object, impl: str, why: str) -> Problem:
    remedy = f"leave out --cuda-graph-impl {impl}, or this"
    return Problem(flag, value, f"excludes --cuda-graph-impl {impl}: {why}", remedy)
