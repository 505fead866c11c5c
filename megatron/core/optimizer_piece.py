"""OptimizerPiece: a flat piece of optimizer state, tied to a parameter.

The optimizer exports pieces, and checkpoints save and load them; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.core.boxes import boxes_of_flat_range
from megatron.core.param_meta import ParamMeta


@dataclass(frozen=True)
class OptimizerPiece:
    """Optimizer state of elements [start, stop) of one parameter's local shard, flattened row-major.

    `data` is a live 1-D view of stop - start elements: a save reads it, a load writes into it. A piece may be empty.
    Without the distributed optimizer every data-parallel rank holds the whole shard: start 0, stop its size.
    """

    key: str
    """Kind of state, such as "main_param", "exp_avg", "exp_avg_sq" or "momentum_buffer"."""

    meta: ParamMeta
    data: Tensor
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert self.data.dim() == 1 and self.data.numel() == self.stop - self.start, self.meta.name

    def boxes(self, coords: Mapping[str, tuple[int, int]]) -> list[tuple[tuple[int, ...], Tensor]]:
        """(offset in the global tensor, live view of the box) of the boxes that make up the piece, on the rank at
        `coords`."""
        flat = boxes_of_flat_range(*self.meta.box(coords), self.start, self.stop)
        return [(box.offset, self.data[box.start - self.start : box.stop - self.start].view(box.shape)) for box in flat]
