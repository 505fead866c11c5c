"""One rank of a layout without a world: fake process groups for stages that are built on fake tensors.

A `FakeGroup` answers every collective at once and moves nothing, so shapes and memory are those of a real rank.
torch's own "fake" backend would need the default process group, which a caller may have for a real world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, ParallelState


class FakeGroup(dist.ProcessGroup):
    """A process group of `size` ranks, of which this is rank 0. Collectives complete at once and write nothing."""

    axis = ""
    """Name of the axis of the mesh."""

    observer: Observer | None = None
    """Is called with each method, this group and the arguments; what it returns is the answer, unless that is None."""


Observer = Callable[..., dist.Work | None]


def _answer(method: str) -> Callable[..., dist.Work]:
    def done(self: FakeGroup, *args: Any, **kwargs: Any) -> dist.Work:
        found = FakeGroup.observer(method, self, *args) if FakeGroup.observer is not None else None
        return FakeWork() if found is None else found

    return done


for _name in (
    "allreduce",
    "all_gather_single",
    "_allgather_base",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "all_to_all_single",
    "alltoall_base",
    "send",
    "recv",
):
    setattr(FakeGroup, _name, _answer(_name))


@contextmanager
def fake_state(parallel: ModelParallelConfig) -> Iterator[ParallelState]:
    """The first rank's place in the model-parallel part of a layout: what a stage needs to be built and run."""
    groups: list[FakeGroup] = []
    known = distributed_c10d._world

    def axis(name: str, size: int) -> Axis:
        if size == 1:
            return Axis()
        group = FakeGroup(0, size)  # type: ignore[call-arg]
        group.axis = name
        groups.append(group)
        # Point-to-point messages name global ranks, which torch looks up in here.
        known.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        known.pg_map[group] = ("fake", None)  # type: ignore[assignment]
        return Axis(group, 0, size, tuple(range(size)))

    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    ep, expt_tp = parallel.expert_model_parallel_size, parallel.expert_tp
    sizes = {"tp": tp, "cp": cp, "ep": ep, "expt_tp": expt_tp, "expt_tp_ep": expt_tp * ep, "tp_cp": tp * cp}
    try:
        yield ParallelState(ParallelDims(tp=tp, cp=cp), 0, {name: axis(name, size) for name, size in sizes.items()})
    finally:
        for group in groups:
            del known.pg_group_ranks[group], known.pg_map[group]
