"""Record the kernels, collectives and memory of one micro-batch in a part of a stage.

Outside compiled regions, each operation counts as one kernel that reads or writes each of its tensors once. Views take
no time. A compiled region counts as one kernel that reads its inputs and writes its outputs. A cast that is a single
kernel on GPUs is counted in the same way. The backward pass of a compiled region reads the region's inputs again.
FlashAttention and cuDNN kernels are represented by fake kernels, which accept attention tiles of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.torch_private import (
    AutogradContext,
    OpOverload,
    next_sequence_number,
    running_node,
    schema_of,
    sequence_number,
    storage_id,
    tree_flatten,
    tree_unflatten,
)
from megatron.core.transformer.recompute import computing_again
from megatron.extensions.plan.planner.live_memory import LiveMemory, tensors_of
from megatron.extensions.plan.planner.time.events import Attention, Collective, Event, Gathered, Move, Product, Wait

FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh _local_scalar_dense set_ "
    "resize_ resize_storage_bytes_ record_stream is_same_size device".split()
)
"""Names of operations that launch no kernel."""

INDEXED = frozenset("embedding gather index index_select index_put_ index_add_ scatter_ take_along_dim".split())
"""Names of operations that access only some elements of their first tensor argument."""

PRODUCTS: dict[str, int] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), 0),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_"), 1),
}
"""Map from the name of a matrix product operator to the position of the first factor among the operator's arguments."""

T = TypeVar("T")

ATTENTION_OF_CPUS = "_scaled_dot_product_flash_attention_for_cpu"


def size_of(x: Tensor) -> int:
    """Return the size in bytes of the distinct elements of `x`. Expanded dimensions count only once."""
    return prod(n if s else 1 for n, s in zip(x.shape, x.stride(), strict=True)) * x.element_size()


def total_size(values: object) -> int:
    """Return the bytes of the tensors among `values`, each counted once."""
    return sum(map(size_of, {id(x): x for x in tensors_of(values)}.values()))


COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, 1),
    "_allgather_base_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "send": ("send", 0, 1),
}
"""Map from the name of an operator to a tuple (kind of collective, argument index of the whole operand, argument index
of the group).

Receives are not listed, because a receive moves the bytes that the matching send already counts.
"""


class _Recorded(dist.Work):
    """Collective in flight."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self.recorder, self.number = recorder, number

    def wait(self, *timeout: object) -> bool:
        if self.recorder.works.pop(self.number, None) is not None:
            self.recorder.add(Wait(self.number))
        return True


class Recorder(LiveMemory):
    """Dispatch mode that appends the events of executed operations to `events`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no code is compiled here, and checking for compilation at every operation is slow

    def __init__(self, fp32_sums: bool, backend: str, any_order: bool = True) -> None:
        """Create a recorder.

        Args:
            fp32_sums: True if gradients of 16-bit weights are summed in fp32.
            backend: Name of the fused attention kernel.
            any_order: True if kernels may add values in any order, using nondeterministic atomics.
        """
        super().__init__()
        self.any_order = any_order
        self.events: list[Event] = []
        self.fp32_sums, self.backend = fp32_sums, backend
        self._numbers, self._unseen = 0, False
        self._at_one_time = 1
        self.works: dict[int, _Recorded] = {}
        """Collectives in flight, by number. This dictionary keeps the collectives' Python objects alive, because torch
        does not."""

        self._changed: set[int] | None = None
        """Storages to which the current compiled region has written, including storages that it created; None outside
        regions."""

        self._moves: dict[tuple[Callable[..., object], int], Move] = {}
        """Memory traffic of each compiled region, keyed by the region's function and the bytes of its inputs."""

        self._nodes = set[int]()
        """Sequence numbers of the autograd nodes that compiled regions created. Operations in the backward pass of
        these nodes are not recorded one by one, because a region's backward pass counts as one kernel."""

    def begin(self) -> None:
        """Clear the recording."""
        self.sizes.clear()
        self._nodes.clear()
        self.now = self.peak = 0
        self.take()

    def take(self) -> tuple[Event, ...]:
        """Return the events recorded so far, and clear them."""
        events, self.events = tuple(self.events), []
        return events

    def add(self, event: Event) -> None:
        if not self._within_kernel():
            self.events.append(event)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Context manager that pauses the recording of events; memory is still counted."""
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def some_of(self, parts: Sequence[T]) -> Iterator[T]:
        """Yield the `parts` of a loop that are run during planning. Each yielded part may represent several similar
        parts.

        The loop is checked in ranges with an odd number of parts. The middle part represents its range if the first,
        the middle and the last part of the range do the same work, with sizes that grow evenly. Otherwise, each half of
        the range is checked in the same way. The last two parts of the loop run first, one after the other, because the
        memory peak may occur in these parts. The memory of a part includes the tensors that the previous part has not
        freed.
        """
        outer = self.events
        passes = dict[int, list[Event]]()
        counts = dict[int, int]()
        ranges = [range(len(parts))]
        ends = ranges[0][-2:]
        while ranges:
            places = ranges.pop()
            if len(places) % 2 == 0:
                ranges += [x for x in (places[:-1], places[-1:]) if x]
                continue
            three = places[0], places[len(places) // 2], places[-1]
            for place in (*ends, *three):
                if place not in passes:
                    self.events = passes[place] = []
                    yield parts[place]
            if _grow_evenly(*(passes[place] for place in three)):
                counts[three[1]] = len(places)
            else:
                ranges += [places[: len(places) // 2], places[len(places) // 2 :]]
        self.events = outer
        for place, count in sorted(counts.items()):
            self.events += passes[place] * count

    def _within_kernel(self) -> bool:
        """Return True if the current operation belongs to a kernel that is recorded as a whole: a planned launch, a
        compiled region, or the backward pass of a compiled region."""
        node = running_node()
        within = node is not None and sequence_number(node) in self._nodes and not computing_again()
        return self._inside or self._unseen or within

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in COLLECTIVES:
            return done(func, args, self._collective(name, args))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._changed is not None:
            self._changed.update(map(storage_id, tensors_of([args[i] for i in _written(func) if i < len(args)])))
        elif name not in FREE and not name.startswith("sym_") and not self._within_kernel():
            self._record(name, func, args, kwargs, out)
        return out

    def _record(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if name in PRODUCTS:
            first = PRODUCTS[name]
            added = name.endswith("_") or (first == 1 and storage_id(args[0]) == storage_id(out))
            name = f"{name.rstrip('_')}_" if added else name
            self.product(name, args[first], args[first + 1], args[0] if added else out, kwargs)
        elif name.startswith(ATTENTION_OF_CPUS):
            self._attention(args, name.endswith("_backward"))
        else:
            self._element_wise(name, func, args, kwargs, out)

    def product(self, name: str, a: Tensor, b: Tensor, out: Tensor, kwargs: dict[str, object]) -> None:
        """Record a matrix product of a [m, k] or [batches, m, k] and b [k, n].

        All groups of a grouped product are assumed to have the same size.
        """
        batches = 1
        (m, k) = a.shape[-2:]
        n = b.shape[-1]
        if "bmm" in name:
            batches = a.shape[0]
        elif "grouped" in name:
            batches = b.shape[0] if b.ndim == 3 else out.shape[0]
            m, k = (m // batches, k) if b.ndim == 3 and a.ndim == 2 else (m, k // batches) if a.ndim == 2 else (m, k)
        added = name.endswith("_")
        whole = size_of(out) * (2 if self.fp32_sums and out.element_size() == 2 else 1)
        sums = 2 * whole if added and kwargs.get("beta", 1) else 0
        moved = size_of(a) + size_of(b) + (0 if sums else whole if added else size_of(out))
        again = computing_again()
        sizes = int(m), int(n), int(k), int(batches)
        self.add(Product(precision_of(a), *sizes, moved, sums, "grouped" in name, again, self._at_one_time))

    @contextmanager
    def at_one_time(self, count: int) -> Iterator[None]:
        """Context manager for `count` products, several of which may run concurrently. Each product in the block is
        recorded with this number."""
        outer, self._at_one_time = self._at_one_time, count
        try:
            yield
        finally:
            self._at_one_time = outer

    def _attention(self, args: Any, backward: bool) -> None:
        """Record causal attention of q [b, heads, s, d] with k and v [b, groups, s, d]."""
        q, k, v = args[1:4] if backward else args[:3]
        batch, heads, length, width = q.shape
        self.attention(batch * heads * length * k.shape[2] / 2, width, v.shape[3], k.shape[2], backward)

    def attention(
        self,
        pairs: float,
        width: int,
        value_width: int,
        length: int,
        backward: bool,
        dropout: bool = False,
        *,
        backend: str | None = None,
    ) -> None:
        """Record the launch of a fused kernel for the given number of query-key pairs over all heads.

        With `dropout`, the backward pass consists of two kernels, which are recorded as one launch. Each of the two
        kernels recomputes the scores and the gradients of the scores, and hashes the dropout masks.
        """
        passes = 1 + dropout
        of_pair = (2 + passes) * width + (1 + passes) * value_width if backward else width + value_width
        hashes = float(pairs * (passes if backward else 1) * dropout)
        backend, flops = "triton" if dropout else backend or self.backend, 2 * pairs * of_pair
        self.add(Attention(backend, max(width, value_width), flops, length, backward, hashes))

    def gathered(self, flops: float, read: float, added: float = 0.0) -> None:
        """Record the launch of a kernel that gathers rows (`Gathered`)."""
        self.add(Gathered(flops, read, added))

    def _element_wise(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given, made = tensors_of((args, kwargs)), tensors_of(out)
        written = tensors_of([args[i] for i in _written(func) if i < len(args)])
        if not written and {storage_id(x) for x in made} <= {storage_id(x) for x in given}:
            return  # views, and operations without tensors, launch no kernel
        if name in INDEXED:
            rows = sum(map(size_of, made)) if not written else max((size_of(x) for x in given[1:]), default=0)
            self.add(Move(2 * rows + sum(size_of(x) for x in given[1:]) * (not written)))
            return
        overwrites = name in ("copy_", "fill_", "zero_")
        read = sum(size_of(x) for x in given if not (overwrites and any(x is y for y in written)))
        self.add(Move(read + sum(map(size_of, written or made))))

    def _collective(self, name: str, args: Any) -> dist.Work:
        kind, operand, group = COLLECTIVES[name]
        self._numbers += 1
        axis: str = dist.ProcessGroup.unbox(args[group]).axis  # type: ignore[attr-defined]  # of a `FakeGroup`
        self.add(Collective(kind, total_size(args[operand]), axis, self._numbers))
        self.works[self._numbers] = _Recorded(self, self._numbers)
        return self.works[self._numbers]

    def run_region(self, function: Callable[..., object], args: tuple[object, ...]) -> object:
        """Run a compiled region, and record it as one forward kernel and one backward kernel. The backward kernel reads
        the inputs again."""
        leaves, tree = tree_flatten(args)
        given, tracked = tensors_of(leaves), torch.is_grad_enabled()
        read = total_size(given)
        places = [i for i, x in enumerate(leaves) if tracked and isinstance(x, Tensor) and x.requires_grad]
        if places:
            inputs = _Inputs.apply(lambda grads: self.add(Move(read + total_size(grads))), *(leaves[i] for i in places))
            for place, x in zip(places, inputs, strict=True):
                leaves[place] = x
        outer = self._changed
        self._changed = set[int]()
        first = next_sequence_number()
        try:
            out = super().run_region(function, tree_unflatten(leaves, tree))
        except (
            Exception
        ):  # recomputation stops as soon as the needed tensors exist, but the real kernel runs to its end
            if (again := self._moves.get((function, read))) is not None:
                self.add(again)
            raise
        finally:
            self._nodes.update(range(first, next_sequence_number()))
            changed, self._changed = self._changed, outer
        known = {storage_id(x) for x in given}
        made = [x for x in tensors_of(out) if storage_id(x) not in known]
        written = [x for x in given if storage_id(x) in changed]
        self._moves[function, read] = move = Move(read + total_size(made) + total_size(written))
        self.add(move)
        read += total_size([x for x in made if x.is_floating_point()])  # the backward pass reads gradients of outputs
        return out


class _InputsContext(AutogradContext):
    record: Callable[[object], None]


class _Inputs(torch.autograd.Function):
    """Identity function that is applied to the inputs of a compiled region. Its backward pass calls `record` with the
    gradients of the inputs."""

    @staticmethod
    def forward(ctx: _InputsContext, record: Callable[[object], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: _InputsContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.record(grads)
        return None, *grads


def _grow_evenly(first: list[Event], middle: list[Event], last: list[Event]) -> bool:
    """Return True if each size in the events of the middle part is the mean of the corresponding sizes in the first and
    the last part."""
    if not len(first) == len(middle) == len(last):
        return False
    for three in zip(first, middle, last, strict=True):
        if not type(three[0]) is type(three[1]) is type(three[2]):
            return False
        for a, b, c in zip(*map(_sizes, three), strict=True):
            if not a == b == c and (isinstance(b, str) or a + c != 2 * b):
                return False
    return True


def _sizes(event: Event) -> tuple[object, ...]:
    """Return the fields of an event, without the number that identifies a collective."""
    values = astuple(event)
    return values[:-1] if isinstance(event, Collective | Wait) else values


def done(func: OpOverload, args: Sequence[object], work: dist.Work) -> object:
    """Return the result of a c10d operator. Depending on the operator, the result is None, `work`, or the operator's
    first argument together with `work`."""
    results = len(schema_of(func).returns)
    return None if results == 0 else work.boxed() if results == 1 else (args[0], work.boxed())


def precision_of(x: Tensor) -> str:
    """Return the precision at which operands like `x` are multiplied; fp16 counts as bf16."""
    return {1: "fp8", 2: "bf16", 4: "fp32"}.get(x.element_size(), "fp64")


def _written(func: OpOverload) -> list[int]:
    """Return the positions of the arguments to which an operation writes."""
    arguments = schema_of(func).arguments
    return [i for i, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]
