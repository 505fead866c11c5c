"""Activations that are computed again in the backward in place of being kept.

Random numbers need no care: dropout masks are functions of the batch, so the second time gives the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.config.model import TransformerConfig
from megatron.core.torch_private import storage_id
from megatron.core.transformer.activation_store import Stored, nothing_saved, packed, unpacked

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Results = Tensor | Iterable[Tensor]
Input = TypeVar("Input", bound=Tensor | tuple[Tensor, ...])
"""A tensor, or a tuple of several, which may be named."""


def recomputed(function: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """function(*args), of which only the arguments are kept; it runs again, whole, when its backward begins."""
    contexts = lambda: (nothing_saved(), again())  # noqa: E731
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _Running(threading.local):
    """Number of functions that this thread is recomputing, nested in each other; alternating passes have separate
    threads."""

    depth = 0


_running = _Running()


@contextmanager
def again() -> Iterator[None]:
    """Mark the code of a block as computed a second time, for a backward pass."""
    _running.depth += 1
    try:
        yield
    finally:
        _running.depth -= 1


def computing_again() -> bool:
    """Return whether what runs now is computed a second time, for a backward pass."""
    return _running.depth > 0


class _View(NamedTuple):
    """Placeholder of a view of a dropped tensor in the autograd graph."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def with_input_recomputed(produce: Callable[[Input], Results], x: Input, consume: Callable[..., T], *args: object) -> T:
    """consume(produce(x), *args), which keeps x where it would keep produce(x), a tensor or several.

    For a cheap `produce`, such as a norm or an activation function, whose input is saved anyway: it alone runs again,
    each time the backward of `consume` needs a result that the last run has not kept. Each result must have memory of
    its own.
    """
    return with_recomputed(_tuple(produce(x)), produce, x, consume, *args)


def with_recomputed(
    results: tuple[Tensor, ...],
    produce: Callable[[Input], Results],
    x: Input,
    consume: Callable[..., T],
    *args: object,
) -> T:
    """consume(*results, *args), which keeps nothing of the results: the backward calls produce(x) for them again."""
    inputs = tuple(packed(part) for part in _tuple(x))
    joined = _joiner(x)
    del x  # its memory may be offloaded
    dropped = {(storage_id(y), y.dtype): number for number, y in enumerate(results)}
    kept, left = set[int](), dict[int, Tensor]()

    def pack(saved: Tensor) -> Tensor | Stored | _View:
        number = dropped.get((storage_id(saved), saved.dtype))
        if number is None:
            return packed(saved)
        kept.add(number)
        return _View(number, saved.size(), saved.stride(), int(saved.storage_offset()))

    @torch.no_grad()
    def unpack(view: Tensor | Stored | _View) -> Tensor:
        if not isinstance(view, _View):
            return unpacked(view)
        if view.number not in left:
            given = [unpacked(part) for part in inputs]
            again = _tuple(produce(joined(given)))
            left.update((number, y) for number, y in enumerate(again) if number in kept)
        return left.pop(view.number).as_strided(*view[1:])

    with saved_tensors_hooks(pack, unpack):
        return consume(*results, *args)


def _joiner(x: Tensor | tuple[Tensor, ...]) -> Callable[[Sequence[Tensor]], Any]:
    """Turns the parts of `x` into what `x` is: a tensor, a tuple or a NamedTuple."""
    if isinstance(x, Tensor):
        return itemgetter(0)
    return getattr(x, "_make", tuple)


def _tuple(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


@dataclass(frozen=True)
class Segment:
    """A layer of a stage, by place in the stage, or consecutive ones that the backward recomputes together."""

    layers: range
    recompute: bool = False
    offload: bool = False
    """True if tensors saved for the backward wait in host memory."""


def recompute_segments(config: TransformerConfig, num_layers: int, offloaded: int = 0) -> list[Segment]:
    """How the layers of a stage are recomputed. Groups that begin in the first `offloaded` layers are offloaded.

    "uniform" saves the input of each group of `recompute_num_layers` layers; "block" saves the inputs of the first
    `recompute_num_layers` layers, and all activations of the others.
    """
    count, full = config.recompute_num_layers or 1, config.recompute_granularity == "full"
    groups = full and config.recompute_method != "block"
    again = num_layers if groups else count if full else 0
    size = count if groups else 1
    starts = range(0, num_layers, size)
    return [Segment(range(i, min(i + size, num_layers)), i < again, i < offloaded) for i in starts]
