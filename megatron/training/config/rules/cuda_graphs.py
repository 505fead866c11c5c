"""Rules of CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def graphs(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """A graph replays the recorded kernels on the same memory. It cannot contain host decisions that change from batch
    to batch, or host waits."""
    p = c.parallel
    impl = p.cuda_graph_impl
    if impl == "none":
        if p.cuda_graph_warmup_steps != field_table()["cuda_graph_warmup_steps"].default:
            yield Problem.no_effect("--cuda-graph-warmup-steps", p.cuda_graph_warmup_steps, "--cuda-graph-impl local")
        return
    name, graph = "--cuda-graph-impl", f"--cuda-graph-impl {impl}"
    if p.cpu:
        yield Problem.exclusive(name, impl, "--cpu", "it records GPU kernels")
    for flag, size in (
        ("--tensor-model-parallel-size", p.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", p.pipeline_model_parallel_size),
        ("--context-parallel-size", p.context_parallel_size),
    ):
        if size > 1:
            yield Problem.exclusive(flag, size, graph, "communication within a micro-batch is not recorded")
    for flag, value, given, why in (
        ("--num-experts", c.model.num_experts, c.model.num_experts, "shapes depend on the routing"),
        ("--reset-attention-mask", None, c.data.reset_attention_mask, "documents differ from sample to sample"),
        ("--cpu-offloading", None, p.cpu_offloading, "buffers in host memory differ from micro-batch to micro-batch"),
        ("--overlap-grad-reduce", None, c.ddp.overlap_grad_reduce, "reductions start during the backward pass"),
        ("--overlap-param-gather", None, c.ddp.overlap_param_gather, "modules wait for parameters while they run"),
        (
            "--deterministic-mode",
            None,
            c.training.deterministic,
            "torch's deterministic indexed writes, as in the loss, read their indices on the host",
        ),
    ):
        if given:
            yield Problem.exclusive(flag, value, graph, why)
