"""The process groups of a layout.

`initialize_model_parallel` builds them once and returns a `ParallelState`. Library code is handed the `Axis` it
needs and never asks a global; the one global below is for entry points, and the readers at the end of the file
serve it under the names that Megatron-LM's users know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from megatron.core.parallel_dims import ParallelDims

__all__ = ["Axis", "ParallelDims", "ParallelState", "initialize_model_parallel"]

SINGLE_AXES = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")
# Groups along several axes: gradients are reduced over the data axes, norms over what cuts the model.
JOINT_AXES = {
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("cp", "tp"),
    "mp": ("pp", "tp"),
    "stage": ("dp", "cp", "tp"),
    "expt_mp": ("pp", "ep", "expt_tp"),
    "expt_tp_ep": ("ep", "expt_tp"),
}

LANES = ("pp", "pp_lane_1", "pp_lane_2", "pp_lane_3")
"""Groups of the same ranks, for messages that must not wait for each other (`pipeline_parallel.p2p`)."""


@dataclass(frozen=True)
class Axis:
    """This rank's group along one axis of the mesh. An axis of size 1 needs no process group."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class ParallelState:
    """One rank's place in a layout and its groups.

    Two models with different layouts in one process have a ParallelState each.
    """

    dims: ParallelDims = field(default_factory=ParallelDims)
    rank: int = 0
    axes: Mapping[str, Axis] = field(default_factory=dict)
    world: Axis = Axis()

    def axis(self, name: str) -> Axis:
        """The group along `name`: an axis of either view, or "dp_cp", "tp_cp", "mp", "stage", "expt_mp", "expt_tp_ep",
        "embd"."""
        return self.axes.get(name, Axis())

    @property
    def tp(self) -> Axis:
        return self.axis("tp")

    @property
    def pp(self) -> Axis:
        return self.axis("pp")

    @property
    def cp(self) -> Axis:
        return self.axis("cp")

    @property
    def dp(self) -> Axis:
        return self.axis("dp")

    @property
    def dp_cp(self) -> Axis:
        """Ranks that hold the same dense parameters: their gradients are summed."""
        return self.axis("dp_cp")

    @property
    def embd(self) -> Axis:
        """The first and the last pipeline rank, which share a tied embedding; size 1 on ranks in between."""
        return self.axis("embd")

    @property
    def lanes(self) -> tuple[Axis, ...]:
        """What pipeline messages travel on: the groups of `LANES`, or "pp" alone where they are not needed."""
        return tuple(self.axes[name] for name in LANES if name in self.axes)

    @property
    def coords(self) -> dict[str, tuple[int, int]]:
        """Axis -> (rank, size), as `ParamMeta.box` takes it."""
        return {name: (self.axis(name).rank, self.axis(name).size) for name in SINGLE_AXES}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    use_tp_pp_dp_mapping: bool = False,
    timeout: timedelta | None = None,
    make_global: bool = True,
) -> ParallelState:
    """Builds every group of a layout over the ranks of torch.distributed's default group.

    Collective: all ranks call it with the same arguments. With `make_global` the result also serves the
    readers below. Raises ValueError if the sizes do not divide the world.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    if world_size % model:
        raise ValueError(f"world size {world_size} is not a multiple of tp * pp * cp = {model}")
    dims = ParallelDims(
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        dp=world_size // model,
        ep=expert_model_parallel_size,
        expt_tp=expert_tensor_parallel_size or tensor_model_parallel_size,
        tp_pp_dp=use_tp_pp_dp_mapping,
    )
    state = build_parallel_state(dims, rank, timeout)
    if make_global:
        set_global_state(state)
    return state


def build_parallel_state(
    dims: ParallelDims, rank: int, timeout: timedelta | None = None, lanes: bool | None = None
) -> ParallelState:
    """The groups of `rank`. Groups of equal membership share one communicator; each rank creates only its own.

    With `lanes`, the default under NCCL, a pipeline has as many groups as `LANES` names."""
    created: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def axis_of(ranks: tuple[int, ...]) -> Axis:
        if len(ranks) == 1:
            return Axis(None, 0, 1, ranks)
        if ranks not in created:
            created[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        return Axis(created[ranks], ranks.index(rank), len(ranks), ranks)

    def mine(*names: str) -> tuple[int, ...]:
        return next(ranks for ranks in dims.groups(*names) if rank in ranks)

    axes = {name: axis_of(mine(name)) for name in SINGLE_AXES}
    axes |= {name: axis_of(mine(*parts)) for name, parts in JOINT_AXES.items()}
    pipeline = mine("pp")
    ends = (pipeline[0], pipeline[-1]) if dims.pp > 1 else (rank,)
    if dims.pp > 2 and rank not in ends:
        # torch names a group after the number of groups that its ranks have made. Ranks in between have no use for one
        # here, but without it their next group would not find its peers.
        dist.new_group([rank], timeout=timeout, use_local_synchronization=True)
    axes["embd"] = axis_of(ends if rank in ends else (rank,))
    if dims.pp > 1 and ("nccl" in dist.get_backend() if lanes is None else lanes):
        for name in LANES[1:]:
            group = dist.new_group(list(pipeline), timeout=timeout, use_local_synchronization=True)
            axes[name] = replace(axes["pp"], group=group)
    size = dims.world_size
    world = Axis(dist.group.WORLD if size > 1 else None, rank, size, tuple(range(size)))
    return ParallelState(dims, rank, axes, world)


_STATE: ParallelState | None = None


def set_global_state(state: ParallelState | None) -> None:
    """Sets what the readers below answer from; None forgets it."""
    global _STATE
    _STATE = state


def get_parallel_state() -> ParallelState:
    """The state that the last `initialize_model_parallel` made global. For entry points only."""
    assert _STATE is not None, "initialize_model_parallel() has not been called"
    return _STATE


def model_parallel_is_initialized() -> bool:
    return _STATE is not None


def get_tensor_model_parallel_rank() -> int:
    return get_parallel_state().tp.rank


def get_tensor_model_parallel_world_size() -> int:
    return get_parallel_state().tp.size


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    return get_parallel_state().tp.group


def get_pipeline_model_parallel_rank() -> int:
    return get_parallel_state().pp.rank


def get_pipeline_model_parallel_world_size() -> int:
    return get_parallel_state().pp.size


def get_pipeline_model_parallel_group() -> dist.ProcessGroup | None:
    return get_parallel_state().pp.group


def get_context_parallel_rank() -> int:
    return get_parallel_state().cp.rank


def get_context_parallel_world_size() -> int:
    return get_parallel_state().cp.size


def get_data_parallel_rank() -> int:
    return get_parallel_state().dp.rank


def get_data_parallel_world_size() -> int:
    return get_parallel_state().dp.size


def get_data_parallel_group() -> dist.ProcessGroup | None:
    return get_parallel_state().dp.group


def get_expert_model_parallel_rank() -> int:
    return get_parallel_state().axis("ep").rank


def get_expert_model_parallel_world_size() -> int:
    return get_parallel_state().axis("ep").size


def is_pipeline_first_stage() -> bool:
    return get_parallel_state().pp.first


def is_pipeline_last_stage() -> bool:
    return get_parallel_state().pp.last
