"""Token dispatch for MoE layers: sends tokens to the ranks of their experts, and sends the experts' outputs back.

Dispatch is a linear map of the tokens: it copies, sends and sorts rows. The combine step adds up the expert outputs of
each token. Because the combine step is the adjoint (transpose) of dispatch, each step is the backward pass of the other
step. A subclass of `Dispatcher` therefore defines only dispatch.

The experts are sharded over the ranks of the axes ep and expt_tp. Every rank dispatches different tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from megatron.core.collectives import (
    LinearMap,
    PassPair,
    all_gather,
    apply_linear,
    apply_linear_together,
    reduce_scatter,
    start_all_to_all,
)
from megatron.core.compiled_regions import region
from megatron.core.host_to_device import HostCopy, integers_on
from megatron.core.moe.grouped_gemms import Segments
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.tensor_parallel.weight_grad import add_rows_


@dataclass(frozen=True)
class RowMap:
    """Differentiable linear map of the rows of a tensor [rows, ...], together with its adjoint (transpose)."""

    forward: LinearMap
    adjoint: LinearMap

    def __call__(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.forward, self.adjoint)

    @property
    def transposed(self) -> RowMap:
        return RowMap(self.adjoint, self.forward)

    def then(self, after: RowMap) -> RowMap:
        return RowMap(lambda x: after.forward(self.forward(x)), lambda y: self.adjoint(after.adjoint(y)))


WAIT = "wait for all-to-all of experts"
"""Name of the profiler range in which a rank waits for an all-to-all without computing. On GPUs, the duration of this
range is not the waiting time, because only the CUDA stream waits and the host continues."""


@dataclass(frozen=True)
class Exchange:
    """Differentiable all-to-all of rows. If a call passes several tensors, all of them are exchanged concurrently."""

    axis: Axis
    send: Sequence[int]
    """Number of rows sent to each rank, in rank order."""

    receive: Sequence[int]
    """Number of rows received from each rank, in rank order."""

    pair: PassPair
    """`PassPair` that interleaves the passes of two micro-batches. While the all-to-all of one pass is in flight, the
    pass of the other micro-batch can compute."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange the rows of each tensor [sum(send), ...], and return tensors [sum(receive), ...]."""
        if self.axis.size == 1:
            return tensors
        return apply_linear_together(tensors, self._run, self.transposed._run)

    @property
    def transposed(self) -> Exchange:
        return replace(self, send=self.receive, receive=self.send)

    def _run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        started = [start_all_to_all(x, list(self.send), list(self.receive), self.axis) for x in tensors]
        self.pair.hand_over()
        with record_function(WAIT):
            return [pending.wait() for pending in started]


@dataclass(frozen=True)
class Routes:
    """Planned dispatch of one micro-batch. A token that selects k experts is sent as k rows, one to the rank of each
    selected expert."""

    of_tokens: RowMap
    """Linear map from this rank's tokens [n, ...] to the rows that the rank sends, [assignments, ...]."""

    of_assignments: RowMap
    """Linear map from the assignments of this rank's tokens, [n * k, ...], to the rows that the rank sends,
    [assignments, ...]. Each token has k assignments, one per selected expert."""

    segments: Segments
    exchange: Exchange | None = None
    arrival: RowMap | None = None
    """Linear map that sorts the rows received from `exchange` by local expert. The result has the shape [rows, ...]."""

    def dispatch(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens [n, h] and routing weights [n * k] to the ranks of the experts. Return the rows [rows, h] that
        this rank's experts process, and the routing weights [rows] of these rows."""
        rows, of_rows = self.of_tokens(tokens), self.of_assignments(weights)
        if self.exchange is not None:
            rows, of_rows = self.exchange(rows, of_rows)
        if self.arrival is not None:
            rows, of_rows = self.arrival(rows), self.arrival(of_rows)
        return rows, of_rows

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sum of the expert outputs for each token of this rank, [n, h]. `rows` [rows, h] contains the
        outputs of the local experts."""
        if self.arrival is not None:
            rows = self.arrival.transposed(rows)
        if self.exchange is not None:
            (rows,) = self.exchange.transposed(rows)
        return self.of_tokens.transposed(rows)


class Dispatcher(ABC):
    """Base class of dispatchers. A dispatcher plans how tokens are sent to their selected experts.

    The token counts of the experts stay on the device if neither message sizes nor large buffers depend on them. In
    this case, the host does not know how many rows are needed, and each buffer has the maximum number of rows. The rows
    that are in use precede the spare rows.
    """

    def __init__(self, num_experts: int, ctx: TPContext, grouped: bool, padded: bool, choices: int) -> None:
        """Create a dispatcher.

        Args:
            num_experts: Number of experts, without zero-computation experts.
            ctx: Tensor-parallel context of the MoE layer.
            grouped: True if the experts use grouped GEMM kernels, which read the row counts from device memory.
            padded: True if every message is padded to the maximum number of rows that the receiving experts accept.
            choices: Number of experts that the router selects from, including zero-computation experts.
        """
        self.ep, self.expt_tp, self.both = (ctx.state.axis(name) for name in ("ep", "expt_tp", "expt_tp_ep"))
        self.num_experts = num_experts
        self.local_experts = num_experts // self.ep.size
        self.choices = choices
        self.first = self.ep.rank * self.local_experts
        self.grouped = grouped
        self.padded = padded
        self.hardware = ctx.hardware
        self.pair = ctx.pair

    @abstractmethod
    def start(self, chosen: Tensor, most: int | None = None) -> Callable[[], Routes]:
        """Start planning a dispatch. All ranks of the axes ep and expt_tp must call this method.

        `chosen` [n, k] contains the experts selected for this rank's tokens. The value `num_experts` marks a dropped
        assignment. If `most` is given, each expert accepts at most `most` assignments from this rank. The returned
        function completes the planning and returns the `Routes`. If the host needs the message sizes, the returned
        function waits for the device, so launch all independent kernels before you call the returned function.
        """

    def copies(self, assignments: Tensor, rows: int, k: int) -> tuple[RowMap, RowMap]:
        """Return two maps whose results have one row for each entry of `assignments`, in the same order. `assignments`
        must be sorted by expert and must not contain spare rows. The first map is for tensors with one row per token
        (`rows` tokens). The second map is for tensors with one row per assignment (k per token)."""
        if self.hardware.host_waits_for(assignments):
            kept = None if assignments.shape[0] == rows * k else assignments
            slots, valid = inverse_of(assignments, rows * k, kept)
            return self.copies_to_slots(assignments, slots, valid, k)
        return take_map(assignments, rows, k), take_map(assignments, rows * k, 1)

    def copies_to_slots(
        self, assignments: Tensor, slots: Tensor, valid: Tensor | None, k: int
    ) -> tuple[RowMap, RowMap]:
        """Return two maps that copy rows to slots (see `slot_map`). The first map is for tensors with one row per
        token, and the second map is for tensors with one row per assignment."""
        of_tokens, of_assignments = (
            slot_map(assignments, slots, valid, each, self.hardware.compiled) for each in (k, 1)
        )
        return of_tokens, of_assignments


SPARE_ROWS = 2
"""Size up to which `AllGatherDispatcher` allocates a buffer without knowing the actual number of rows. The unit is the
number of rows under a balanced expert load. If a larger buffer might be needed, the host instead waits for the actual
number of rows.
"""


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that all-gathers the tokens. Each rank then selects the tokens that its experts process. Use this
    dispatcher if there are few experts, or if each token selects about as many experts as there are expert-parallel
    ranks."""

    def start(self, chosen: Tensor, most: int | None = None) -> Callable[[], Routes]:
        both, local = self.both, self.local_experts
        to_all = gather_map(both)
        tokens, k = chosen.shape[0] * both.size, chosen.shape[1]
        experts = local_numbers(all_gather(chosen, both), self.first, local)
        order, counts = sort_assignments(experts, local)
        rows = tokens * min(k, local) if most is None else min(tokens * k, most * both.size * local)
        if self.hardware.host_waits_for(chosen) and self.grouped and rows * self.ep.size <= SPARE_ROWS * tokens * k:
            assignments, slots = order[:rows], inverse_of(order, order.shape[0])[0]
            dropless = self.ep.size == 1 and most is None
            valid = None if dropless else experts.flatten() < local
            maps = self.copies_to_slots(assignments, slots, valid, k)
            routes = Routes(*behind(to_all, maps), Segments.of_counts(counts, spare=not dropless))
            return lambda: routes
        share = even_shares(order.shape[0], self.choices)[self.first : self.first + local]
        sizes = HostCopy[int](counts, share)

        def finish() -> Routes:
            splits = sizes.read()
            maps = self.copies(order[: sum(splits)], tokens, k)
            return Routes(*behind(to_all, maps), Segments.of_sizes(splits, chosen.device))

        return finish


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends each token only to the ranks of its experts, with an all-to-all over ep followed by an
    all-gather over expt_tp.

    The host must wait for the message sizes, unless all messages are padded or there is only one expert-parallel rank.
    """

    def start(self, chosen: Tensor, most: int | None = None) -> Callable[[], Routes]:
        order, counts = sort_assignments(chosen, self.num_experts)
        # table [ep * expt_tp, E]: number of assignments from each rank of the group to each expert
        table = all_gather(counts[None], self.both)
        padded = most is not None and self.padded and self.ep.size > 1
        if padded or (self.ep.size == 1 and self.hardware.host_waits_for(chosen) and self.grouped):
            routes = self._by_bounds(chosen, order, table, most)
            return lambda: routes
        share = even_shares(order.shape[0], self.choices)[: self.num_experts] * self.both.size
        sizes = HostCopy[int](table.flatten(), share)
        return lambda: self._by_sizes(chosen, order, np.array(sizes.read()))

    def _by_sizes(self, chosen: Tensor, order: Tensor, counts: np.ndarray) -> Routes:
        """Return routes whose buffers have exactly the required number of rows. `counts` contains the number of
        assignments from each rank to each expert, on the host."""
        ep, expt_tp = self.ep, self.expt_tp
        table = counts.reshape(ep.size, expt_tp.size, -1).swapaxes(0, 1)  # [expt_tp, ep, E]
        mine = table[expt_tp.rank, ep.rank].reshape(ep.size, -1).sum(1).tolist()
        arriving = table[:, :, self.first : self.first + self.local_experts]  # shape [expt_tp, ep, local experts]
        sizes = arriving.sum((1, 2)).tolist()
        exchange = Exchange(ep, mine, arriving[expt_tp.rank].sum(1).tolist(), self.pair)
        arrival = gather_uneven_map(expt_tp, sizes).then(sort_blocks_map(arriving, chosen.device))
        segments = Segments.of_sizes(arriving.sum((0, 1)).tolist(), chosen.device)
        return Routes(*self.copies(order[: sum(mine)], *chosen.shape), segments, exchange, arrival)

    def _by_bounds(self, chosen: Tensor, order: Tensor, table: Tensor, most: int | None) -> Routes:
        """Return routes whose buffers have the maximum number of rows. The host does not read the token counts.

        If ep is 1, there is no all-to-all, and the rows of a rank are its assignments, sorted by expert. If ep is
        larger than 1, each rank sends exactly `most` rows to every expert, and fills unused rows with meaningless
        values. The received rows are sorted by expert, with the spare rows at the end.
        """
        ep = self.ep
        expt_tp = self.expt_tp
        local = self.local_experts
        k, valid = chosen.shape[1], None if most is None else chosen.flatten() < self.num_experts
        slots = inverse_of(order, order.shape[0])[0]
        arriving = table.view(ep.size, expt_tp.size, -1)[:, :, self.first : self.first + local].transpose(0, 1)
        if ep.size == 1:
            assignments = order if most is None else order[: most * self.num_experts]
            places = torch.arange(assignments.shape[0], device=order.device).expand(expt_tp.size, -1).contiguous()
            experts = torch.searchsorted(arriving[:, 0].cumsum(1), places, right=True)  # [expt_tp, rows]
        else:
            assert most is not None
            counts = table[ep.rank * expt_tp.size + expt_tp.rank]
            begin, within = counts.cumsum(0) - counts, torch.arange(most, device=order.device)
            assignments = order[(begin[:, None] + within).clamp_(max=order.shape[0] - 1).flatten()]
            expert = chosen.flatten().clamp(max=self.num_experts - 1)
            slots = slots + (expert * most - begin[expert])
            numbers = torch.arange(local, device=order.device)[:, None]
            experts = torch.where(within < arriving[..., None], numbers, local)  # shape [expt_tp, ep, local, most]
        segments = Segments.of_counts(arriving.sum((0, 1)), spare=most is not None)
        maps = self.copies_to_slots(assignments, slots, valid, k)
        if self.both.size == 1:
            return Routes(*maps, segments)
        parts = [assignments.shape[0] // ep.size] * ep.size
        arrival = gather_map(expt_tp).then(permutation_map(experts.flatten().argsort(stable=True)))
        return Routes(*maps, segments, Exchange(ep, parts, parts, self.pair), arrival)


def behind(first: RowMap, copies: tuple[RowMap, RowMap]) -> tuple[RowMap, RowMap]:
    """Return two maps. Each map applies `first`, followed by the corresponding map in `copies`."""
    return first.then(copies[0]), first.then(copies[1])


DISPATCHERS: dict[str, type[Dispatcher]] = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}


def even_shares(total: int, parts: int) -> list[int]:
    """Divide `total` into `parts` integers that are as equal as possible."""
    edges = [total * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(edges)]


def local_numbers(experts: Tensor, first: int, count: int) -> Tensor:
    """Convert global expert numbers to local numbers. The experts `first` to `first + count - 1` are local and get the
    numbers 0 to `count - 1`. All other experts get the number `count`."""
    numbers = experts - first
    return torch.where((numbers < 0) | (numbers >= count), count, numbers)


def sort_assignments(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the assignments `chosen` [n, k] by expert. Return the indices that sort the flattened assignments [n * k],
    with dropped assignments at the end, and the number of assignments to each expert [E]."""
    experts, order = chosen.flatten().sort(stable=True)
    edges = torch.searchsorted(experts, torch.arange(num_experts + 1, device=chosen.device))
    return order, edges.diff()


def inverse_of(order: Tensor, count: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Invert the permutation `order` [m], which contains distinct numbers smaller than `count`.

    The first result [count] contains the position of each number in `order`, or 0 for a number that `order` does not
    contain. The second result is a bool mask [count] that is True for the numbers in `kept`, or None if `kept` is None.
    """
    places = order.new_zeros(count)
    places[order] = torch.arange(order.shape[0], device=order.device)
    if kept is None:
        return places, None
    valid = torch.zeros(count, dtype=torch.bool, device=order.device)
    valid.index_fill_(0, kept, True)
    return places, valid


def sum_of_slots(y: Tensor, slots: Tensor, valid: Tensor | None, k: int) -> Tensor:
    """Return the sum of the rows of y in the valid slots of each token: y [slots, ...] -> [n, ...]. `slots` [n * k]
    contains the k slots of each token, one for each selected expert. `valid` [n * k] is False for slots that are
    ignored. torch.compile fuses this function into a single kernel."""
    if valid is None:
        return y.index_select(0, slots).unflatten(0, (-1, k)).sum(1)
    if not y.shape[0]:  # no token selected an expert of this rank
        return y.new_zeros(slots.shape[0] // k, *y.shape[1:])
    rows = y.index_select(0, torch.where(valid, slots, 0)).unflatten(0, (-1, k))
    return rows.masked_fill(~valid.view(-1, k, *[1] * (y.ndim - 1)), 0.0).sum(1)


def slot_map(assignments: Tensor, slots: Tensor, valid: Tensor | None, k: int, compiled: bool) -> RowMap:
    """Return a map that copies the rows of x [n, ...] to slots [slots, ...]. Slot i receives row `assignments[i] // k`.

    `slots[a]` is the slot of assignment a. `valid` [n * k] is False for assignments without a slot, or None if every
    assignment has a slot. Slots without a valid assignment have meaningless contents. The adjoint adds up the slots of
    each row of x in a fixed order, so it is deterministic.
    """
    index, sum_up = assignments // k, region(sum_of_slots, compiled)
    return RowMap(lambda x: x.index_select(0, index), lambda y: sum_up(y, slots, valid, k))


def take_map(assignments: Tensor, rows: int, k: int) -> RowMap:
    """Return a map that copies the rows of x [rows, ...] to the given assignments: x [rows, ...] -> [assignments, ...].
    The assignment with number a receives row a // k.

    The adjoint adds up the gradients of all copies of a row in a fixed order. If no assignment is dropped, every row is
    copied k times, and the adjoint is a plain sum over the k copies.
    """
    index = assignments // k
    if assignments.shape[0] == rows * k:
        return slot_map(assignments, inverse_of(assignments, rows * k)[0], None, k, compiled=False)

    def add_up(y: Tensor) -> Tensor:
        out = y.new_zeros(rows, *y.shape[1:])
        add_rows_(out, index, y)
        return out

    return RowMap(lambda x: x.index_select(0, index), add_up)


def permutation_map(order: Tensor) -> RowMap:
    """Return a map that reorders rows: row i of the result is row `order[i]` of the input."""
    places = inverse_of(order, order.shape[0])[0]
    return RowMap(lambda x: x.index_select(0, order), lambda y: y.index_select(0, places))


def gather_map(axis: Axis) -> RowMap:
    """Return a map that all-gathers the rows of all ranks, in rank order. Each rank must have the same number of
    rows."""
    return RowMap(partial(all_gather, axis=axis), partial(reduce_scatter, axis=axis))


def gather_uneven_map(axis: Axis, sizes: list[int]) -> RowMap:
    """Return a map that all-gathers the rows of all ranks, in rank order. Rank i has `sizes[i]` rows. In the
    collective, the rows of each rank are padded to the maximum size."""
    most, mine = max(sizes), sizes[axis.rank]
    if axis.size == 1 or min(sizes) == most:
        return gather_map(axis)

    def gather(x: Tensor) -> Tensor:
        padded = torch.cat((x, x.new_zeros(most - mine, *x.shape[1:])))
        parts = all_gather(padded, axis).view(axis.size, most, *x.shape[1:])
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce(y: Tensor) -> Tensor:
        padded = y.new_zeros(axis.size, most, *y.shape[1:])
        for part, own in zip(padded, y.split(sizes), strict=True):
            part[: own.shape[0]] = own
        return reduce_scatter(padded.flatten(0, 1), axis)[:mine]

    return RowMap(gather, reduce)


def sort_blocks_map(counts: np.ndarray, device: torch.device) -> RowMap:
    """Return a map that sorts rows by expert. The input rows must be sorted by source rank, and by expert within each
    source rank. `counts` [..., experts] contains the number of rows that each source rank sends to each expert."""
    blocks = counts.reshape(-1, counts.shape[-1])
    if blocks.shape[0] == 1:
        return RowMap(lambda x: x, lambda y: y)
    expert = np.tile(np.arange(blocks.shape[1]), blocks.shape[0]).repeat(blocks.flatten())
    order = expert.argsort(kind="stable")
    return permutation_map(integers_on(device, order))
