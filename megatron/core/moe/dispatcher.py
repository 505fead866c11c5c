"""Token dispatch of mixture-of-experts layers: sends tokens to the ranks of their experts, and returns the outputs.

Dispatch is a linear map of the tokens: rows are copied, sent and sorted. Combine, which sums the outputs of a token's
experts, is the adjoint of dispatch, and each is the gradient of the other. So a dispatcher defines dispatch alone.

Ranks along (ep, expt_tp) hold all experts between them. Each has tokens of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.core.collectives import LinearMap, all_gather, apply_linear, reduce_scatter, start_all_to_all
from megatron.core.host_to_device import integers_of, integers_on
from megatron.core.moe.experts import Segments
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ExpertAxes
from megatron.core.tensor_parallel.weight_grad import add_rows_


@dataclass(frozen=True)
class RowMap:
    """Linear map of the rows of a tensor [rows, ...], and its adjoint. Differentiable."""

    forward: LinearMap
    adjoint: LinearMap

    def __call__(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.forward, self.adjoint)

    @property
    def transposed(self) -> RowMap:
        return RowMap(self.adjoint, self.forward)

    def then(self, after: RowMap) -> RowMap:
        return RowMap(lambda x: after.forward(self.forward(x)), lambda y: self.adjoint(after.adjoint(y)))


@dataclass(frozen=True)
class Routes:
    """Dispatch of one micro-batch."""

    of_tokens: RowMap
    """This rank's tokens [n, ...] -> rows of the local experts [rows, ...], expert by expert."""

    of_assignments: RowMap
    """The k assignments of this rank's tokens [n * k, ...] -> the same rows."""

    segments: Segments


class Dispatcher(ABC):
    """Plans the dispatch of tokens from the experts that they chose."""

    def __init__(self, num_experts: int, axes: ExpertAxes) -> None:
        self.num_experts, self.axes = num_experts, axes
        self.local_experts = num_experts // axes.ep.size
        self.first = axes.ep.rank * self.local_experts

    @abstractmethod
    def plan(self, chosen: Tensor) -> Routes:
        """Plans a dispatch: chosen [n, k] experts of this rank's tokens, `num_experts` for a dropped one.

        Collective. Waits for the device, as the host needs the sizes of messages.
        """


class AllGatherDispatcher(Dispatcher):
    """All-gathers the tokens; each rank picks those of its experts. For few experts, and k about as large as ep."""

    def plan(self, chosen: Tensor) -> Routes:
        both = self.axes.both
        tokens, k = chosen.shape
        order, counts = sort_assignments(all_gather(chosen, both), self.num_experts)
        splits = integers_of(counts, even_shares(order.numel(), self.num_experts))
        begin = sum(splits[: self.first])
        local = splits[self.first : self.first + self.local_experts]
        assignments = order[begin : begin + sum(local)]
        to_all = gather_map(both)
        return Routes(
            to_all.then(take_map(assignments, tokens * both.size, k)),
            to_all.then(take_map(assignments, tokens * both.size * k, 1)),
            Segments(tuple(local), chosen.device),
        )


class AllToAllDispatcher(Dispatcher):
    """Sends each token to the ranks of its experts only: all-to-all over ep, then all-gather over expt_tp."""

    def plan(self, chosen: Tensor) -> Routes:
        ep, expt_tp = self.axes.ep, self.axes.expt_tp
        tokens, k = chosen.shape
        order, counts = sort_assignments(chosen, self.num_experts)
        # [expt_tp, ep, E]: the number of assignments from each rank of the group to each expert.
        gathered = integers_of(
            all_gather(counts, self.axes.both), even_shares(order.numel(), self.num_experts) * self.axes.both.size
        )
        table = np.array(gathered).reshape(ep.size, expt_tp.size, -1).swapaxes(0, 1)
        mine = table[expt_tp.rank, ep.rank].reshape(ep.size, -1).sum(1).tolist()
        arriving = table[:, :, self.first : self.first + self.local_experts]  # [expt_tp, ep, local experts]
        sizes = arriving.sum((1, 2)).tolist()
        travel = all_to_all_map(ep, mine, arriving[expt_tp.rank].sum(1).tolist())
        travel = travel.then(gather_uneven_map(expt_tp, sizes)).then(sort_blocks_map(arriving, chosen.device))
        assignments = order[: sum(mine)]
        return Routes(
            take_map(assignments, tokens, k).then(travel),
            take_map(assignments, tokens * k, 1).then(travel),
            Segments(tuple(arriving.sum((0, 1)).tolist()), chosen.device),
        )


DISPATCHERS: dict[str, type[Dispatcher]] = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}


def even_shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` integers as equal as possible."""
    edges = [total * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(edges)]


def sort_assignments(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts assignments by expert: chosen [n, k] -> order [n * k], dropped ones last, and counts [E]."""
    experts, order = chosen.flatten().sort(stable=True)
    edges = torch.searchsorted(experts, torch.arange(num_experts + 1, device=chosen.device))
    return order, edges.diff()


def take_map(assignments: Tensor, rows: int, k: int) -> RowMap:
    """Copies rows to assignments: x [rows, ...] -> [assignments, ...], assignment i takes row i // k.

    The adjoint sums the copies of a row in the same order each time; by a plain sum where none is dropped.
    """
    index = assignments // k
    if assignments.shape[0] < rows * k:

        def add_up(y: Tensor) -> Tensor:
            out = y.new_zeros(rows, *y.shape[1:])
            add_rows_(out, index, y)
            return out

        return RowMap(lambda x: x.index_select(0, index), add_up)
    place = torch.empty_like(assignments)
    place[assignments] = torch.arange(rows * k, device=place.device)
    return RowMap(
        lambda x: x.index_select(0, index),
        lambda y: y.index_select(0, place).unflatten(0, (rows, k)).sum(1),
    )


def gather_map(axis: Axis) -> RowMap:
    """All-gathers rows, equally many of each rank, in order of rank."""
    return RowMap(partial(all_gather, axis=axis), partial(reduce_scatter, axis=axis))


def gather_uneven_map(axis: Axis, sizes: list[int]) -> RowMap:
    """All-gathers rows, `sizes` of each rank, in order of rank. Ranks with fewer rows than others send padding."""
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


def all_to_all_map(axis: Axis, send: list[int], receive: list[int]) -> RowMap:
    """All-to-all of rows: sends `send[i]` rows to rank i and receives `receive[i]` from it, in order of rank."""
    if axis.size == 1:
        return RowMap(lambda x: x, lambda y: y)

    def exchange(x: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
        return start_all_to_all(x, outgoing, incoming, axis).wait()

    return RowMap(
        partial(exchange, outgoing=send, incoming=receive), partial(exchange, outgoing=receive, incoming=send)
    )


def sort_blocks_map(counts: np.ndarray, device: torch.device) -> RowMap:
    """Sorts rows from (source, expert) to (expert, source) order; counts [..., experts] of each source."""
    blocks = counts.reshape(-1, counts.shape[-1])
    if blocks.shape[0] == 1:
        return RowMap(lambda x: x, lambda y: y)
    expert = np.tile(np.arange(blocks.shape[1]), blocks.shape[0]).repeat(blocks.flatten())
    order = expert.argsort(kind="stable")
    to_experts, to_sources = integers_on(device, order), integers_on(device, order.argsort())
    return RowMap(lambda x: x.index_select(0, to_experts), lambda y: y.index_select(0, to_sources))
