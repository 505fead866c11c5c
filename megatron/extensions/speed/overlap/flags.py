"""Register the flags for communication overlap and its implementation. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.config.flag_spec import flag
from megatron.core.tensor_parallel.linear_spec import LINEARS
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.step_parts import STEP_PARTS

HERE = "megatron.extensions.speed.overlap"


@extension_flags("overlapped communication", may_change=True, rules=f"{HERE}.rules:overlap")
@dataclass(frozen=True)
class OverlapFlags:
    tp_comm_overlap: bool = flag(
        False,
        off_without="--tensor-model-parallel-size above 1",
        needs="--sequence-parallel; add --sequence-parallel, which sends the same number of bytes, or remove "
        "--tp-comm-overlap",
    )
    """Overlap tensor-parallel collectives with matrix products, which are computed in parts; needs
    --sequence-parallel."""

    tp_comm_overlap_method: str | None = flag(
        None, choices=("ring", "symmetric"), no_effect_without="--tp-comm-overlap"
    )
    """--tp-comm-overlap: use a ring of sends and receives (ring, the default), or torch's fused operations over the
    symmetric memory of the GPUs of one node (symmetric)."""

    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        needs="--num-experts: the all-to-alls belong to experts; add --num-experts, or remove "
        "--overlap-moe-expert-parallel-comm",
    )
    """Interleave the forward pass of one micro-batch with the backward pass of another micro-batch, so that one pass
    computes while the other waits for an expert all-to-all. Needs --pipeline-schedule interleaved or zb-h2."""


def overlaps(linear: Any, ctx: Any) -> bool:
    """Return True if the collectives of a linear layer overlap with its GEMMs."""
    return ctx.options(OverlapFlags).tp_comm_overlap and ctx.sequence_parallel and ctx.tp.size > 1


LINEARS.substitute("column_parallel", f"{HERE}.comm_overlap:OverlappedColumnParallelLinear", when=overlaps)
LINEARS.substitute("row_parallel", f"{HERE}.comm_overlap:OverlappedRowParallelLinear", when=overlaps)
STEP_PARTS.register(
    "passes in turns",
    f"{HERE}.batch_overlap:PARTS",
    when=lambda config: config.options(OverlapFlags).overlap_moe_expert_parallel_comm,
    in_turns=True,
)
CALLBACKS.register(
    "symmetric memory",
    f"{HERE}.comm_overlap:SymmetricMemory",
    when=lambda config: config.options(OverlapFlags).tp_comm_overlap_method == "symmetric",
)
