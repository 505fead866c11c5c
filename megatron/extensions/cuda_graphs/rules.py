"""Rules of CUDA graphs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import param_gather
from megatron.extensions.cuda_graphs.flags import CudaGraphFlags
from megatron.training.config.flags import named_value
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def graphs(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """A graph replays the recorded kernels on the same memory. It cannot contain host decisions that change from batch
    to batch, or host waits."""
    p, options = c.parallel, c.options(CudaGraphFlags)
    impl = options.cuda_graph_impl
    if impl == "none":
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
        (
            "--cpu-offloading",
            None,
            named_value(c, "cpu_offloading"),
            "buffers in host memory differ from micro-batch to micro-batch",
        ),
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
    if c.model.experimental_attention_variant == "gated_delta_net":
        other = f"--experimental-attention-variant {c.model.experimental_attention_variant}"
        yield Problem.exclusive(name, impl, other, "its triangular solves have not been recorded")
    if c.ddp.shards_gradients:
        why = "memory of whole gradients comes and goes during the passes"
        strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
        yield Problem.exclusive(name, impl, strategy, why)
    if param_gather(p) is not None and c.optimizer.use_distributed_optimizer:  # else another rule speaks of it
        why = "recorded steps cast the weights that they find in bf16"
        yield Problem.exclusive("--fp8-param-gather", None, graph, why)
