"""What the optimizer hands to the checkpoint: flat pieces of state, each tied to a parameter.

The optimizer exports these and the checkpoint saves and fills them; neither knows the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.core.param_meta import ParamMeta


@dataclass(frozen=True)
class OptimizerPiece:
    """Optimizer state of elements [start, stop) of one parameter's local shard, flattened row-major.

    `data` is a live 1-D view of stop - start elements: saving reads it, loading writes into it. A piece may be
    empty. Without a distributed optimizer every data-parallel rank holds the whole shard: start 0, stop its size.
    """

    key: str
    """Kind of state: "main_param", "exp_avg", "exp_avg_sq", "momentum_buffer"."""

    meta: ParamMeta
    data: Tensor
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert self.data.dim() == 1 and self.data.numel() == self.stop - self.start, self.meta.name
