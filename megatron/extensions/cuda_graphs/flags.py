"""Flags of CUDA graphs, and where their runner is. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.parts import MICROBATCH_RUNNERS
from megatron.training.extensions import extension_flags

HERE = "megatron.extensions.cuda_graphs"


@extension_flags("CUDA graphs", may_change=True, rules=f"{HERE}.rules:graphs")
@dataclass(frozen=True)
class CudaGraphFlags:
    cuda_graph_impl: str = flag("none", choices=("none", "local"))
    """GPUs: record the forward and backward pass of a micro-batch as a CUDA graph and replay it (local)."""

    cuda_graph_warmup_steps: int = flag(3, above=0, no_effect_without="--cuda-graph-impl local")
    """--cuda-graph-impl: warm-up steps before recording, in which kernels are compiled and selected."""


MICROBATCH_RUNNERS.register(
    "cuda_graphs",
    f"{HERE}.graphed_microbatches:CudaGraphs",
    when=lambda config: config.options(CudaGraphFlags).cuda_graph_impl != "none",
    launches_once=True,
)
