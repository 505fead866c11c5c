"""Brings each token to the ranks that hold its experts, and the experts' outputs back.

The way there is a linear map of the tokens: rows are copied, sent and sorted. Everything else is its adjoint. The way
back, which adds up what the experts make of a token's copies, is the adjoint; the gradient of either way is the other.
So a dispatcher says how to go there, and nothing more.

Ranks along (ep, expt_tp) hold all experts between them, and tokens of their own each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import LinearMap, all_gather, apply_linear, reduce_scatter
from megatron.core.host_copies import copied_to
from megatron.core.moe.experts import Segments
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ExpertAxes
from megatron.core.tensor_parallel.weight_grad import add_rows_


@dataclass(frozen=True)
class RowMap:
    """A linear map of tensors [rows, ...] along their rows, and its adjoint."""

    forward: LinearMap
    adjoint: LinearMap

    def __call__(self, x: Tensor) -> Tensor:
        return apply_linear(x, self.forward, self.adjoint)

    @property
    def transposed(self) -> RowMap:
        return RowMap(self.adjoint, self.forward)

    def then(self, after: RowMap) -> RowMap:
        return RowMap(
            lambda x: after.forward(self.forward(x)),
            lambda y: self.adjoint(after.adjoint(y)),
        )


@dataclass(frozen=True)
class Routes:
    """The ways of one micro-batch."""

    of_tokens: RowMap
    """[n, ...] of this rank's tokens -> [rows, ...] for the local experts, expert by expert."""

    of_assignments: RowMap
    """[n * k, ...] of the tokens' k assignments -> the same rows."""

    segments: Segments


class Dispatcher(ABC):
    """Plans the routes of tokens from the experts they have chosen."""

    def __init__(self, num_experts: int, axes: ExpertAxes) -> None:
        self.num_experts, self.axes = num_experts, axes
        self.local_experts = num_experts // axes.ep.size
        self.first = axes.ep.rank * self.local_experts

    @abstractmethod
    def plan(self, chosen: Tensor) -> Routes:
        """chosen [n, k] experts of this rank's tokens; `num_experts` for none. Collective; waits for the device, as
        the sizes of what travels must be known."""


class AllGatherDispatcher(Dispatcher):
    """Every rank gets all tokens and picks those of its experts. For few experts, and k about as large as ep."""

    def plan(self, chosen: Tensor) -> Routes:
        both = self.axes.both
        tokens, k = chosen.shape
        order, counts = sort_assignments(all_gather(chosen, both), self.num_experts)
        splits = counts.tolist()
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
    """Each token travels to the ranks of its experts only: all-to-all over ep, then all-gather over expt_tp."""

    def plan(self, chosen: Tensor) -> Routes:
        ep, expt_tp = self.axes.ep, self.axes.expt_tp
        tokens, k = chosen.shape
        order, counts = sort_assignments(chosen, self.num_experts)
        # [expt_tp, ep, E]: how many assignments each rank of the group has for each expert.
        table = all_gather(counts[None], self.axes.both).view(ep.size, expt_tp.size, -1).transpose(0, 1).cpu()
        mine = table[expt_tp.rank, ep.rank].view(ep.size, -1).sum(1).tolist()
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


def sort_assignments(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """chosen [n, k] -> the n * k assignments by expert, those dropped last, and the number of each expert's [E]."""
    experts, order = chosen.flatten().sort(stable=True)
    edges = torch.searchsorted(experts, torch.arange(num_experts + 1, device=chosen.device))
    return order, edges.diff()


def take_map(assignments: Tensor, rows: int, k: int) -> RowMap:
    """x [rows, ...] -> [assignments, ...]: assignment i takes row i // k. The adjoint adds up what one row gave, in an
    order that is the same each time; where all `rows` * k assignments are there, as without drops, by a plain sum."""
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
    """The rows of all ranks, equally many of each, in order of rank."""
    return RowMap(partial(all_gather, axis=axis), partial(reduce_scatter, axis=axis))


def gather_uneven_map(axis: Axis, sizes: list[int]) -> RowMap:
    """The rows of all ranks, `sizes` of each, in order of rank. Ranks with fewer than others send padding."""
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
    """`send` rows for each rank, one rank after the other -> the `receive` rows that came from each."""
    if axis.size == 1:
        return RowMap(lambda x: x, lambda y: y)

    def exchange(x: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
        result = x.new_empty(sum(incoming), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), incoming, outgoing, group=axis.group)
        return result

    return RowMap(
        partial(exchange, outgoing=send, incoming=receive), partial(exchange, outgoing=receive, incoming=send)
    )


def sort_blocks_map(counts: Tensor, device: torch.device) -> RowMap:
    """Rows that lie by source and then by expert, counts [..., experts] -> by expert and then by source."""
    blocks = counts.reshape(-1, counts.shape[-1])
    if blocks.shape[0] == 1:
        return RowMap(lambda x: x, lambda y: y)
    expert = torch.arange(blocks.shape[1]).repeat(blocks.shape[0]).repeat_interleave(blocks.flatten())
    order = expert.argsort(stable=True)
    to_experts, to_sources = copied_to(order, device), copied_to(order.argsort(), device)
    return RowMap(lambda x: x.index_select(0, to_experts), lambda y: y.index_select(0, to_sources))
