"""A tensor handed around the ranks of an axis, from each to the next."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis


class Passing:
    """A tensor on its way to the next rank, and the previous rank's, of the same shape, on its way here: `into` a
    contiguous tensor where one is given.

    All ranks pass tensors on in one order. gloo takes no CUDA tensors point to point: these go through host memory.
    """

    def __init__(self, x: Tensor, axis: Axis, tag: int, into: Tensor | None = None) -> None:
        self._device, self._into = x.device, into
        through_host = x.is_cuda and dist.get_backend(axis.group) == "gloo"
        self._operand = x.to("cpu") if through_host else x.contiguous()
        self._result = torch.empty_like(self._operand) if into is None or through_host else into
        following, previous = (axis.ranks[(axis.rank + by) % axis.size] for by in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._operand, following, group=axis.group, tag=tag),
                dist.P2POp(dist.irecv, self._result, previous, group=axis.group, tag=tag),
            ]
        )

    def wait(self) -> Tensor:
        """What came from the previous rank. The tensor that went may be changed or dropped afterwards."""
        for work in self._works:
            work.wait()
        if self._into is None:
            return self._result.to(self._device)
        return self._into if self._result is self._into else self._into.copy_(self._result)
