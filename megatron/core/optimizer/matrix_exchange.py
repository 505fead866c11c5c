"""Exchange of matrices within a pipeline stage. Each rank gathers the whole matrices that it owns from the flat shards
of all ranks, transforms them, and sends the results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megatron.core.collectives import Pending, start_all_to_all
from megatron.core.optimizer.matrix_plan import Matrix, MatrixPlan, Part
from megatron.core.parallel_state import Axis

Read = Callable[[Part, Tensor], None]
"""Function that takes a `Part` of a matrix and a tensor of the part's shape, and copies this rank's values of the part
to the tensor."""

Write = Callable[[Part, Matrix, Tensor], None]
"""Function that takes a `Part` of a matrix, the `Matrix` and the transformed values of the part, and stores these
values."""

Direction = Callable[[Tensor, Sequence[int]], Tensor]
"""Function that transforms each of the n matrices in a stack [n, rows, columns] independently of the other matrices,
without changing the shape. The second argument of the function contains the number of each matrix in the
`MatrixPlan`."""


@dataclass(frozen=True)
class _Round:
    """One round of an exchange, in which parts of several matrices are sent together. The fields list the parts of each
    message, in the order in which the message contains them."""

    read: list[list[Part]]
    """Parts that this rank sends to the ranks that own the matrices, one list per receiving rank."""
    arriving: list[list[Part]]
    """Parts of this rank's own matrices that this rank receives from other ranks, one list per sending rank."""
    returned: list[list[Part]]
    """Parts of this rank's own, transformed matrices that this rank sends back, one list per receiving rank."""
    written: list[list[Part]]
    """Parts of transformed matrices that this rank receives from the ranks that own the matrices, one list per sending
    rank."""
    stacks: list[list[int]]
    """Numbers of the matrices that this rank owns, as one list for each stack of matrices of equal size."""


class MatrixExchange:
    """Exchange of matrix parts among the ranks of a pipeline stage (`axis`). Messages have the dtype `dtype`.
    All ranks of `axis` must call `transform` together."""

    def __init__(self, plan: MatrixPlan, axis: Axis, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        self.axis = axis
        self.dtype = dtype
        self.device = device
        self._owned = plan.owned(axis.rank)
        self._mine = plan.parts(axis.rank)
        """This rank's parts of all matrices, keyed by matrix number."""
        self._theirs = [
            self._mine if place == axis.rank else plan.parts(place, self._owned) for place in range(axis.size)
        ]
        """Parts of the matrices that this rank owns: for each rank of `axis`, a dictionary that maps matrix numbers to
        the parts that are stored on that rank."""
        self._rounds: dict[tuple[int, ...], _Round] = {}

    def _round(self, numbers: Sequence[int]) -> _Round:
        """Return the exchange round for the matrices in `numbers`."""
        key = tuple(numbers)
        if key not in self._rounds:
            self._rounds[key] = self._planned_round(numbers)
        return self._rounds[key]

    def _planned_round(self, numbers: Sequence[int]) -> _Round:
        plan = self.plan
        me = self.axis.rank
        own = [number for number in numbers if plan.owners[number] == me]
        read: list[list[Part]] = []
        arriving: list[list[Part]] = []
        returned: list[list[Part]] = []
        written: list[list[Part]] = []
        for place in range(self.axis.size):
            owned_there = [number for number in numbers if plan.owners[number] == place]
            read.append(_parts(self._mine, [number for number in owned_there if plan.sends(me, number)]))
            written.append(_parts(self._mine, owned_there))
            arriving.append(_parts(self._theirs[place], [number for number in own if plan.sends(place, number)]))
            returned.append(_parts(self._theirs[place], own))
        chosen = set(own)
        stacks = _by_size(plan, [number for number in self._owned if number in chosen])
        return _Round(read, arriving, returned, written, stacks)

    def transform(self, read: Read, direction: Direction, write: Write, numbers: Sequence[int] | None = None) -> None:
        """Replace every matrix x of the stage by direction(x). If `numbers` is given, transform only the matrices with
        these numbers, in a single round.

        Rounds overlap: while the matrices of one round are transformed, the matrices of the next round are gathered,
        and the results of the previous round are sent back.

        Args:
            read: Function that reads this rank's parts of x.
            direction: Function that transforms a stack of matrices.
            write: Function that stores this rank's parts of the result direction(x).
            numbers: Numbers of the matrices to transform, or None for all matrices.
        """
        rounds = [self._round(each) for each in (self.plan.rounds if numbers is None else [numbers])]
        returning: tuple[_Round, Pending] | None = None
        gathering = self._start_gather(rounds[0], read) if rounds else None
        for i, current in enumerate(rounds):
            assert gathering is not None
            matrices = self._stacked(current, gathering.wait())
            gathering = self._start_gather(rounds[i + 1], read) if i + 1 < len(rounds) else None
            results = [direction(*each) for each in zip(matrices, current.stacks, strict=True)]
            if returning is not None:
                self._finish_return(*returning, write)
            returning = current, self._start_return(current, results)
        if returning is not None:
            self._finish_return(*returning, write)

    def _start_gather(self, current: _Round, read: Read) -> Pending:
        outgoing, incoming = _sizes(current.read), _sizes(current.arriving)
        packed = torch.empty(sum(outgoing), dtype=self.dtype, device=self.device)
        for part, values in _views(packed, current.read):
            read(part, values)
        return start_all_to_all(packed, outgoing, incoming, self.axis)

    def _stacked(self, current: _Round, received: Tensor) -> list[Tensor]:
        """Return the received matrices as tensors [n, rows, columns], one for each stack of `current`."""
        boxes, stacks = self._empty_stacks(current)
        for part, values in _views(received, current.arriving):
            boxes[part.matrix][part.place].copy_(values)
        return stacks

    def _start_return(self, current: _Round, results: Sequence[Tensor]) -> Pending:
        outgoing, incoming = _sizes(current.returned), _sizes(current.written)
        boxes = self._boxes(current, results)
        packed = torch.empty(sum(outgoing), dtype=self.dtype, device=self.device)
        for part, values in _views(packed, current.returned):
            values.copy_(boxes[part.matrix][part.place])
        return start_all_to_all(packed, outgoing, incoming, self.axis)

    def _finish_return(self, current: _Round, pending: Pending, write: Write) -> None:
        for part, values in _views(pending.wait(), current.written):
            write(part, self.plan.matrices[part.matrix], values)

    def _empty_stacks(self, current: _Round) -> tuple[dict[int, Tensor], list[Tensor]]:
        stacks = [
            torch.empty(len(group), *self.plan.matrices[group[0]].size, dtype=self.dtype, device=self.device)
            for group in current.stacks
        ]
        return self._boxes(current, stacks), stacks

    def _boxes(self, current: _Round, stacks: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return a dictionary that maps the number of each matrix in `stacks` to a view of the matrix. The view has the
        shape that the matrix has within its parameter."""
        return {
            number: matrix.view(self.plan.matrices[number].shape)
            for group, stack in zip(current.stacks, stacks, strict=True)
            for number, matrix in zip(group, stack, strict=True)
        }


def _parts(parts: dict[int, list[Part]], numbers: Sequence[int]) -> list[Part]:
    return [part for number in numbers for part in parts.get(number, ())]


def _by_size(plan: MatrixPlan, numbers: Sequence[int]) -> list[list[int]]:
    return [list(group) for _, group in groupby(numbers, key=lambda number: plan.matrices[number].size)]


def _sizes(messages: list[list[Part]]) -> list[int]:
    return [sum(part.numel for part in message) for message in messages]


def _views(packed: Tensor, messages: list[list[Part]]) -> list[tuple[Part, Tensor]]:
    """Return a pair (part, view of the part's values) for each part in `messages`. `packed` contains the values of all
    messages, one after another."""
    found, start = [], 0
    for part in (part for message in messages for part in message):
        found.append((part, packed[start : start + part.numel].view(part.shape)))
        start += part.numel
    return found
