"""Which layers of a stage are recomputed together. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.model import TransformerConfig


@dataclass(frozen=True)
class Segment:
    """Consecutive layers of a stage, by place in the stage, and whether the backward recomputes them together."""

    layers: range
    recompute: bool


def recompute_segments(config: TransformerConfig, num_layers: int) -> list[Segment]:
    """How the layers of a stage are recomputed.

    "uniform" keeps the input of each group of `recompute_num_layers` layers, "block" that of each of the first
    `recompute_num_layers` layers and all activations of the rest.
    """
    if config.recompute_granularity != "full":
        return [Segment(range(num_layers), False)] if num_layers else []
    count = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        head = min(count, num_layers)
        rest = range(head, num_layers)
        return [Segment(range(i, i + 1), True) for i in range(head)] + ([Segment(rest, False)] if rest else [])
    starts = range(0, num_layers, count)
    return [Segment(range(start, min(start + count, num_layers)), True) for start in starts]
