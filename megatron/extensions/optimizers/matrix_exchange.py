"""Gathers the whole matrices that a rank owns from the flat shards of its pipeline stage, and sends them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megatron.core.collectives import Pending, start_all_to_all
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.parallel_state import ParallelState
from megatron.extensions.optimizers.flags import MuonFlags
from megatron.extensions.optimizers.matrix_plan import Matrix, MatrixPlan, Part, splits_of

Read = Callable[[Part, Tensor], None]
"""Writes this rank's values of a part into a tensor of its shape."""

Write = Callable[[Part, Matrix, Tensor], None]
"""Takes up the transformed values of a part."""


@dataclass(frozen=True)
class _Round:
    """Parts that travel at the same time: for each rank of the stage those of one message, in order."""

    read: list[list[Part]]
    """Elements that this rank sends to the owners."""
    arriving: list[list[Part]]
    """Elements of this rank's matrices that other ranks send to it."""
    returned: list[list[Part]]
    """Elements of this rank's matrices that it returns to all holders of a part."""
    written: list[list[Part]]
    """Elements that the owners return to this rank."""
    stacks: list[list[int]]
    """The matrices that this rank owns, those of one size together."""


class MatrixExchange:
    """The exchange of one rank, over the ranks of its pipeline stage (`axis`), in tensors of `dtype`. Collective over
    them."""

    def __init__(self, config: OptimizerConfig, ddp: DistributedDataParallel, state: ParallelState) -> None:
        options, self.device = config.options(MuonFlags), ddp.device
        self.axis = axis = state.axis("stage")
        self.dtype = matrix_dtype(ddp.main_dtype, options.muon_fp32_matmul_prec)
        blockwise, distributed = options.muon_tp_mode == "blockwise", config.use_distributed_optimizer
        plan = MatrixPlan(ddp.layouts, state.dims, axis.ranks, distributed, splits_of(options), blockwise)
        self.plan = plan
        me, everyone = axis.rank, range(axis.size)
        owned, mine = plan.owned(me), plan.parts(me)
        theirs = [mine if place == me else plan.parts(place, owned) for place in everyone]
        self._rounds = []
        for numbers in plan.rounds:
            own = [number for number in numbers if plan.owners[number] == me]
            of_owner = [[number for number in numbers if plan.owners[number] == place] for place in everyone]
            self._rounds.append(
                _Round(
                    read=[_parts(mine, [n for n in of_owner[place] if plan.sends(me, n)]) for place in everyone],
                    arriving=[_parts(theirs[place], [n for n in own if plan.sends(place, n)]) for place in everyone],
                    returned=[_parts(theirs[place], own) for place in everyone],
                    written=[_parts(mine, of_owner[place]) for place in everyone],
                    stacks=_by_size(plan, [number for number in owned if number in set(own)]),
                )
            )

    def transform(self, read: Read, direction: Callable[[Tensor], Tensor], write: Write) -> None:
        """Writes direction(x) for every matrix x of the stage, where `read` says what x is.

        `direction` maps x [n, rows, columns] to the same shape, each of n matrices by itself. The next matrices are
        gathered while these are transformed, and these are sent back while the next ones are transformed.
        """
        returning: tuple[_Round, Pending] | None = None
        gathering = self._start_gather(self._rounds[0], read) if self._rounds else None
        for i, current in enumerate(self._rounds):
            assert gathering is not None
            matrices = self._stacked(current, gathering.wait())
            gathering = self._start_gather(self._rounds[i + 1], read) if i + 1 < len(self._rounds) else None
            results = [direction(stack) for stack in matrices]
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
        """Tensors [n, rows, columns] of the matrices that have arrived."""
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
        """Views of the matrices in `stacks`, in the shapes of their boxes."""
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
    """Each part of the messages, and its place in their buffer."""
    found, start = [], 0
    for part in (part for message in messages for part in message):
        found.append((part, packed[start : start + part.numel].view(part.shape)))
        start += part.numel
    return found


def matrix_dtype(main_dtype: torch.dtype, precision: str) -> torch.dtype:
    """The dtype in which matrices travel and are orthogonalized."""
    return torch.bfloat16 if main_dtype == torch.float32 and precision == "medium" else main_dtype
