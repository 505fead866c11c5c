"""Activations that are computed again in the backward in place of being kept.

Random numbers need no care: dropout masks are functions of the batch, so the second time gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), of which only the arguments are kept; it runs again, whole, when its backward begins."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class _View(NamedTuple):
    """What stands in the graph for a view of the dropped tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def with_input_recomputed(
    produce: Callable[[Tensor], Tensor], x: Tensor, consume: Callable[..., Any], *args: Any
) -> Any:
    """consume(produce(x), *args), which keeps x where it would keep produce(x).

    For a cheap `produce`, as a norm or an activation function, whose input is kept anyway: it alone runs again, each
    time the backward of `consume` asks for its result. That result must have memory of its own.
    """
    y = produce(x)
    memory, dtype = y.untyped_storage().data_ptr(), y.dtype

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.untyped_storage().data_ptr() != memory or saved.dtype != dtype:
            return saved
        return _View(saved.size(), saved.stride(), int(saved.storage_offset()))

    @torch.no_grad()
    def unpack(kept: Tensor | _View) -> Tensor:
        return kept if isinstance(kept, Tensor) else produce(x).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        return consume(y, *args)
