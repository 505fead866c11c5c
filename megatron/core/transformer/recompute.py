"""Activation recomputation: activations are recomputed in the backward pass instead of being saved. The recomputed
activations are bit-identical to the original ones. The state of the random number generators need not be restored,
because dropout masks are functions of the batch.
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
"""Type of the input of a recomputed function. The input is a tensor, or a tuple or NamedTuple of tensors."""


def recomputed(function: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """Return function(*args), and save only the arguments for the backward pass. The function runs again when its
    backward pass starts."""
    contexts = lambda: (nothing_saved(), again())  # noqa: E731
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _Running(threading.local):
    """Number of nested recomputations that the calling thread is running. The number is thread-local, because
    interleaved passes of two micro-batches run in separate threads."""

    depth = 0


_running = _Running()


@contextmanager
def again() -> Iterator[None]:
    """Context manager that marks the code within the block as a recomputation."""
    _running.depth += 1
    try:
        yield
    finally:
        _running.depth -= 1


def computing_again() -> bool:
    """Return True if the calling code is running as part of a recomputation."""
    return _running.depth > 0


class _View(NamedTuple):
    """Object that the autograd graph holds in place of a view of a recomputed tensor."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def with_input_recomputed(produce: Callable[[Input], Results], x: Input, consume: Callable[..., T], *args: object) -> T:
    """Return consume(produce(x), *args), and save x instead of produce(x) for the backward pass. `produce` may return
    one or several tensors.

    Use this function if `produce` is cheap and x is saved anyway, for example if `produce` is a norm or an activation
    function. When the backward pass of `consume` needs a result of `produce` that is no longer in memory, only
    `produce` runs again. If `produce` returns several tensors, they must not share memory.
    """
    return with_recomputed(_tuple(produce(x)), produce, x, consume, *args)


def with_recomputed(
    results: tuple[Tensor, ...],
    produce: Callable[[Input], Results],
    x: Input,
    consume: Callable[..., T],
    *args: object,
) -> T:
    """Return consume(*results, *args), and save x instead of `results` for the backward pass. The backward pass calls
    produce(x) to recompute the results.

    Args:
        results: Results of an earlier call of produce(x).
        produce: Function that computes `results` from x.
        x: Input of `produce`, which is saved for the backward pass.
        consume: Function that is called with the results, followed by `args`.
    """
    inputs = tuple(packed(part) for part in _tuple(x))
    joined = _joiner(x)
    del x  # x must not be kept alive, because it may be offloaded
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
    """Return a function that builds a value of the same type as `x` (a tensor, a tuple or a NamedTuple) from a list of
    tensors."""
    if isinstance(x, Tensor):
        return itemgetter(0)
    return getattr(x, "_make", tuple)


def _tuple(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


@dataclass(frozen=True)
class Segment:
    """A single layer of a stage, or several consecutive layers that the backward pass recomputes together. `layers`
    contains the positions of the layers within the stage."""

    layers: range
    recompute: bool = False
    offload: bool = False
    """True if the tensors that the segment saves for the backward pass are offloaded to host memory."""


def recompute_segments(config: TransformerConfig, num_layers: int, offloaded: int = 0) -> list[Segment]:
    """Divide the layers of a stage into segments. The backward pass recomputes a segment as a whole, or not at all. If
    a segment starts with one of the first `offloaded` layers, its activations are offloaded.

    With the recompute method "uniform", only the input of each group of `recompute_num_layers` layers is saved. With
    the method "block", the first `recompute_num_layers` layers save only their inputs, and the other layers save all
    activations.
    """
    count, full = config.recompute_num_layers or 1, config.recompute_granularity == "full"
    groups = full and config.recompute_method != "block"
    again = num_layers if groups else count if full else 0
    size = count if groups else 1
    starts = range(0, num_layers, size)
    return [Segment(range(i, min(i + size, num_layers)), i < again, i < offloaded) for i in starts]
