"""Register the CUDA graph flags and the graph runner, and report features that CUDA graphs do not support. This module
does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import Section, flag
from megatron.core.tensor_parallel.linear_formats import gathered_format
from megatron.training.config.flags import named_value
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.step_parts import STEP_PARTS

HERE = "megatron.extensions.speed.cuda_graphs"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that a training step can be captured as a CUDA graph. A graph replays the recorded kernels on the same
    memory, so it can contain neither host decisions that change between batches nor synchronizations with the host."""
    own = config.options(CudaGraphFlags)
    c = config
    p = config.parallel
    impl = own.cuda_graph_impl
    if impl == "none":
        return
    name, graph = "--cuda-graph-impl", f"--cuda-graph-impl {impl}"
    if p.cpu:
        yield Problem.exclusive(name, impl, "--cpu", "it records GPU kernels")
    for other, size in (
        ("--tensor-model-parallel-size", p.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", p.pipeline_model_parallel_size),
        ("--context-parallel-size", p.context_parallel_size),
    ):
        if size > 1:
            yield Problem.exclusive(other, size, graph, "communication within a micro-batch is not recorded")
    for other, value, given, why in (
        ("--num-experts", c.model.num_experts, c.model.num_experts, "shapes depend on the routing"),
        (
            "--reset-attention-mask",
            None,
            c.data.reset_attention_mask,
            "document boundaries differ from sample to sample",
        ),
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
            yield Problem.exclusive(other, value, graph, why)
    try:
        variants = c.model.linear_attentions
    except ValueError:
        variants = ()  # another rule reports a pattern that cannot be parsed
    for variant in variants:
        if variant in ("gated_delta_net", "kimi_delta_attention"):
            by_flag = c.model.experimental_attention_variant is not None
            other = f"--experimental-attention-variant {variant}" if by_flag else f"layers with {variant}"
            yield Problem.exclusive(name, impl, other, "recording its triangular solves is untested")
    if c.ddp.shards_gradients:
        why = "memory for whole gradients is allocated and freed during the forward and backward pass"
        strategy = f"--data-parallel-sharding-strategy {c.ddp.data_parallel_sharding_strategy}"
        yield Problem.exclusive(name, impl, strategy, why)
    if gathered_format(p) is not None and c.optimizer.use_distributed_optimizer:  # otherwise, another rule applies
        why = "recorded steps cast weights that are stored in bf16"
        yield Problem.exclusive("--fp8-param-gather", None, graph, why)


@extension_flags("CUDA graphs", may_change=True, rules=rules)
@dataclass(frozen=True)
class CudaGraphFlags:
    cuda_graph_impl: str = flag("none", choices=("none", "local"))
    """On GPUs, capture the forward and backward pass of a micro-batch as a CUDA graph, and replay the graph (local)."""

    cuda_graph_warmup_steps: int = flag(3, above=0, no_effect_without="--cuda-graph-impl local")
    """--cuda-graph-impl: number of warm-up steps before recording, in which kernels are compiled and selected."""


def _records(config: Section) -> bool:
    return config.options(CudaGraphFlags).cuda_graph_impl != "none"


STEP_PARTS.register("cuda_graphs", f"{HERE}.graphed_microbatches:PARTS", when=_records, launches_once=True)
CALLBACKS.register("cuda_graphs", f"{HERE}.graphed_microbatches:SideStream", when=_records)
