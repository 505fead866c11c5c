"""Activations that are computed again in the backward in place of being kept.

Random numbers need no care: dropout masks are functions of the batch, so the second time gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.config.model import TransformerConfig


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), of which only the arguments are kept. It runs again when its backward first asks for a tensor
    that it had saved, and stops when it has saved the last one.

    torch's `checkpoint(use_reentrant=False)` does the same, and imports torch's compiler, which plans do without.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    dropped = _Dropped(function, args)
    with saved_tensors_hooks(dropped.pack, dropped.unpack):
        return function(*args)


class _Inputs(torch.autograd.Function):
    """Saves tensors as a part of the graph, so that recomputation around this one drops them too."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return node.clone()


class _AllThere(Exception):
    """Ends a recomputation once it has every saved tensor."""


class _Holder:
    """What the graph holds in place of a saved tensor."""

    value: Tensor | None = None
    """Between the recomputation and its use in the backward."""


class _Dropped:
    """The tensors that a call of a function has saved for its backward, none of which is kept."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.others = [None if isinstance(x, Tensor) else x for x in args]
        self.places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        self.inputs = _Inputs.apply(torch.empty(0, requires_grad=True), *(args[place] for place in self.places))
        self.saved: list[tuple[ref[_Holder], torch.Size, torch.dtype]] = []

    def pack(self, x: Tensor) -> _Holder:
        holder = _Holder()
        self.saved.append((ref(holder), x.shape, x.dtype))
        return holder

    def unpack(self, holder: _Holder) -> Tensor:
        if holder.value is None:
            self._recompute()
        value, holder.value = holder.value, None
        if value is None:
            raise RuntimeError("recomputation has saved fewer tensors than the first run")
        return value

    def _recompute(self) -> None:
        numbers = iter(range(len(self.saved)))

        def pack(x: Tensor) -> Tensor:
            number, x = next(numbers), x.detach()
            holder, *kind = self.saved[number]
            if [x.shape, x.dtype] != kind:
                raise RuntimeError(f"recomputation saves {[x.shape, x.dtype]}, the first run saved {kind}")
            if (waiting := holder()) is not None:  # None where the graph has dropped it
                waiting.value = x
            if number == len(self.saved) - 1:
                raise _AllThere
            return x

        args = self.others.copy()
        for place, x in zip(self.places, self.inputs.grad_fn.saved_tensors, strict=True):
            args[place] = x
        with torch.enable_grad(), suppress(_AllThere), saved_tensors_hooks(pack, lambda x: x):
            self.function(*args)


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
    memory, dtype = y.untyped_storage()._cdata, y.dtype

    def pack(saved: Tensor) -> Tensor | _View:
        if saved.untyped_storage()._cdata != memory or saved.dtype != dtype:
            return saved
        return _View(saved.size(), saved.stride(), int(saved.storage_offset()))

    @torch.no_grad()
    def unpack(kept: Tensor | _View) -> Tensor:
        return kept if isinstance(kept, Tensor) else produce(x).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        return consume(y, *args)


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
