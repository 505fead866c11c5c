"""ZeRO-1: each data-parallel rank updates its shard of every bucket (Rajbhandari et al., arXiv 1910.02054, P_os).

The flat tensors here are all that the optimizer proper sees. Without sharding a rank's part is the whole bucket and
everything else is the same, so there is one implementation.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.optimizer_piece import OptimizerPiece


class OptimizerShard:
    """What one rank owns of one bucket: its main parameters, flat, with the gradient attached, and their moments.

    Main parameters are the parameter memory itself where that has the main dtype; else a copy in the main dtype.
    Moments are allocated at once, so that a checkpoint can load into them and memory is final before the first step.
    """

    def __init__(self, bucket: Bucket, moments: tuple[str, ...]) -> None:
        self.bucket = bucket
        self.aliased = bucket.owned_params.dtype == bucket.owned_grads.dtype
        self.main = bucket.owned_params if self.aliased else bucket.owned_params.to(bucket.owned_grads.dtype)
        self.main.grad = bucket.owned_grads
        self.moments = {name: torch.zeros_like(self.main) for name in moments}

    def write_params(self) -> None:
        """Main parameters into this rank's part of the parameters."""
        if not self.aliased:
            self.bucket.owned_params.copy_(self.main)

    def read_params(self) -> None:
        """This rank's part of the parameters into the main parameters."""
        if not self.aliased:
            self.main.copy_(self.bucket.owned_params)

    def pieces(self) -> Iterator[OptimizerPiece]:
        """Live views of the state, one for each kind of state and owned part of a parameter."""
        tensors: dict[str, Tensor] = ({} if self.aliased else {"main_param": self.main}) | self.moments
        first = self.bucket.owned_range[0]
        for piece in self.bucket.owned_pieces:
            start = piece.offset - first
            for key, tensor in tensors.items():
                data = tensor[start : start + piece.stop - piece.start]
                yield OptimizerPiece(key, piece.meta, data, piece.start, piece.stop)
