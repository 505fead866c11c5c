"""Process groups of a layout: tensor, pipeline, context, data and expert parallelism.

`initialize_model_parallel` builds the groups once and returns a `ParallelState`. Library code receives the `Axis` it
needs as an argument and never reads a global. This file defines one global `ParallelState`, which only entry points
use. Entry points access this global through the functions at the end of this file, which have the same names as in
Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import chain

import torch.distributed as dist

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_dims import ParallelDims

SINGLE_AXES = ("tp", "cp", "dp", "pp", "ep", "expt_tp", "expt_dp")
# Groups along several axes. Gradients are reduced over the data axes, and norms over the axes that shard the model.
JOINT_AXES = {
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("cp", "tp"),
    "mp": ("pp", "tp"),
    "stage": ("dp", "cp", "tp"),
    "expt_mp": ("pp", "ep", "expt_tp"),
    "expt_tp_ep": ("ep", "expt_tp"),
}

LANES = ("pp", "pp_lane_1", "pp_lane_2", "pp_lane_3")
"""Names of process groups that contain the same pipeline ranks. Pipeline messages that must not wait for each other use
different groups (`pipeline_parallel.p2p`)."""


@dataclass(frozen=True)
class Axis:
    """This rank's group along one axis of the mesh. An axis of size 1 needs no process group."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)

    exchanges_sums: bool = True
    """True if CPU tensors are summed by exchanging them between ranks and adding them locally, which is faster than
    gloo's collectives."""

    levels: tuple[Axis, ...] = ()
    """Inner and outer axis that together form the context-parallel axis, if context parallelism has two levels; empty
    for any other axis."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


ALONE = Axis()
"""Default axis of size 1, which contains only this rank."""


@dataclass(frozen=True)
class ParallelState:
    """One rank's position in a layout, and its process groups.

    If one process holds two models with different layouts, each model has a separate ParallelState.
    """

    dims: ParallelDims = field(default_factory=ParallelDims)
    rank: int = 0
    axes: Mapping[str, Axis] = field(default_factory=dict)
    world: Axis = ALONE

    def axis(self, name: str) -> Axis:
        """Return this rank's group along the axis `name`, which is one of `SINGLE_AXES`, a key of `JOINT_AXES`, or
        "embd"."""
        return self.axes.get(name, ALONE)

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
        """Ranks with the same dense parameters, over which gradients are summed."""
        return self.axis("dp_cp")

    def shard_axis(self, data_axis: str) -> Axis:
        """Return the axis over which parameter states are sharded. The result is `data_axis`, or the part of
        `data_axis` within one instance if there are several instances."""
        return self.axes.get(f"{data_axis}_shard", self.axis(data_axis))

    def copies_axis(self, data_axis: str) -> Axis:
        """Return the axis of the ranks that hold the same shards as this rank, one rank in each instance."""
        return self.axis(f"{data_axis}_copies")

    @property
    def embd(self) -> Axis:
        """Group of the first and the last pipeline rank, which share a tied embedding; a group of size 1 on all other
        ranks."""
        return self.axis("embd")

    @property
    def lanes(self) -> tuple[Axis, ...]:
        """This rank's groups for pipeline messages: one for each name in `LANES`, or only the group "pp" if the backend
        needs no separate groups."""
        return tuple(self.axes[name] for name in LANES if name in self.axes)

    @cached_property
    def coords(self) -> dict[str, tuple[int, int]]:
        """Pair (rank, size) of this rank along each axis, keyed by axis name, as `ParamMeta.box` expects it."""
        return {name: (self.axis(name).rank, self.axis(name).size) for name in SINGLE_AXES}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    use_tp_pp_dp_mapping: bool = False,
) -> ParallelState:
    """Build all process groups of a layout over the ranks of torch.distributed's default group.

    All ranks must call this function with the same arguments, which are named as in Megatron-LM. After the call, the
    functions at the end of this file return values of the new state. The function raises ValueError if the sizes do not
    divide the world size.
    """
    config = ModelParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        use_tp_pp_dp_mapping=use_tp_pp_dp_mapping,
    )
    return build_groups(config)


def build_groups(
    config: ModelParallelConfig, timeout: timedelta | None = None, backend: str | None = None
) -> ParallelState:
    """Build all process groups for a configuration, like `initialize_model_parallel`.

    `timeout` is the timeout of collectives in the groups. `backend` has the same meaning as in `build_parallel_state`.
    """
    dims = ParallelDims.from_config(config, dist.get_world_size())
    global _STATE
    _STATE = build_parallel_state(dims, dist.get_rank(), timeout, backend)
    return _STATE


def build_parallel_state(
    dims: ParallelDims, rank: int, timeout: timedelta | None = None, backend: str | None = None
) -> ParallelState:
    """Build the groups of `rank`. With NCCL, each pipeline has one group for each name in `LANES`.

    All ranks call `new_group` the same number of times. The groups that all ranks create in their n-th calls are
    disjoint and together contain every rank. torch relies on this: it names a group after the number of groups created
    before, and NCCL with a bound device creates each group by an `ncclCommSplit`, which is collective over the whole
    world. Every rank must therefore call `new_group`, even for a group of which it is the only member. Axes that divide
    the world into the same groups share a communicator.

    Args:
        dims: Sizes of the layout.
        rank: Global rank.
        timeout: Timeout of the groups' collectives.
        backend: Backend of the groups; by default, the backend that torch.distributed uses.
    """
    cuts = {name: dims.groups(*JOINT_AXES.get(name, (name,))) for name in (*SINGLE_AXES, *JOINT_AXES)}
    if dims.instances > 1:
        for name, axes in (("dp_cp", JOINT_AXES["dp_cp"]), ("expt_dp", ("expt_dp",))):
            cuts[f"{name}_shard"], cuts[f"{name}_copies"] = dims.instance_groups(*axes), dims.copy_groups(*axes)
    if dims.cp_inner is not None:
        rings = dims.cp // dims.cp_inner
        cuts["cp_inner"] = dims.instance_groups("cp", parts=rings)
        cuts["cp_outer"] = dims.copy_groups("cp", parts=rings)
    cuts[
        "embd"
    ] = [  # In each pipeline, the first and the last rank form a group. Every other rank is alone in a group.
        part for ranks in cuts["pp"] for part in (ranks[:1] + ranks[1:][-1:], *((inner,) for inner in ranks[1:-1]))
    ]
    backend = backend or (dist.get_backend() if dist.is_initialized() else "gloo")
    exchanges = backend != "nccl"
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def group_of(name: str) -> tuple[int, ...]:
        return next(ranks for ranks in cuts[name] if rank in ranks)

    def new_group(name: str) -> dist.ProcessGroup | None:
        covered = sorted(chain.from_iterable(cuts[name]))
        assert covered == list(range(dims.world_size)), f"the groups along {name} must hold each rank once: {covered}"
        return dist.new_group(list(group_of(name)), timeout=timeout, use_local_synchronization=True)

    found = {}
    for name, cut in cuts.items():
        ranks, key = group_of(name), tuple(cut)
        if key not in made:
            made[key] = new_group(name) if max(map(len, cut)) > 1 else None
        group = made[key] if len(ranks) > 1 else None
        found[name] = Axis(group, ranks.index(rank), len(ranks), ranks, exchanges)
    if dims.cp_inner is not None:
        found["cp"] = replace(found["cp"], levels=(found["cp_inner"], found["cp_outer"]))
    if dims.pp > 1 and "nccl" in backend:
        found |= {name: replace(found["pp"], group=new_group("pp")) for name in LANES[1:]}
    size = dims.world_size
    world = Axis(dist.group.WORLD if size > 1 else None, rank, size, tuple(range(size)), exchanges)
    return ParallelState(dims, rank, found, world)


_STATE: ParallelState | None = None


def get_parallel_state() -> ParallelState:
    """Return the state that the last call of `initialize_model_parallel` made global. Only entry points may call this
    function."""
    assert _STATE is not None, "initialize_model_parallel() has not been called"
    return _STATE


def _readers(axis: str) -> tuple[Callable[[], int], Callable[[], int], Callable[[], dist.ProcessGroup | None]]:
    """Return three functions without arguments for the group of this rank along an axis. The functions return this
    rank's index in the group, the size of the group, and the group itself."""
    return (
        lambda: get_parallel_state().axis(axis).rank,
        lambda: get_parallel_state().axis(axis).size,
        lambda: get_parallel_state().axis(axis).group,
    )


# Megatron-LM's names, for entry points and user scripts
get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tensor_model_parallel_group = _readers("tp")
get_pipeline_model_parallel_rank, get_pipeline_model_parallel_world_size, get_pipeline_model_parallel_group = _readers(
    "pp"
)
get_data_parallel_rank, get_data_parallel_world_size, get_data_parallel_group = _readers("dp")
get_context_parallel_rank, get_context_parallel_world_size, get_context_parallel_group = _readers("cp")
get_expert_model_parallel_rank, get_expert_model_parallel_world_size, get_expert_model_parallel_group = _readers("ep")
