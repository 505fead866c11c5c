"""Ranks and coordinates of a layout, as integers. This module needs neither torch nor process groups.

Two meshes arrange the same ranks. From the outermost to the innermost, the axes of the mesh for dense layers are (pp,
dp, cp, tp), and the axes of the mesh for experts are (pp, expt_dp, ep, expt_tp). Rank order and group membership
therefore follow Megatron-LM's order tp-cp-ep-dp-pp; `use_tp_pp_dp_mapping` swaps dp and pp in both meshes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from operator import add

from megatron.core.config.parallel import ModelParallelConfig


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallelism axes of a layout. `world_size` must be tp * pp * cp * dp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    expt_tp: int = 1
    tp_pp_dp: bool = False
    instances: int = 1
    """Number of distributed-optimizer instances. An instance is a group of data-parallel ranks that together hold one
    sharded copy of the optimizer states."""
    cp_inner: int | None = None
    """Number of neighbouring context-parallel ranks that divide the attention heads among themselves; None if context
    parallelism has only one level."""

    @classmethod
    def from_config(cls, config: ModelParallelConfig, world_size: int) -> ParallelDims:
        """Return the sizes of the parallelism axes for a validated configuration. The method raises ValueError if the
        sizes do not divide the world size."""
        model = config.model_parallel_size
        if world_size % model:
            raise ValueError(
                f"world size {world_size} must be a multiple of tp * pp * cp = {model}; "
                f"nearest: {max(1, round(world_size / model)) * model}"
            )
        dims = cls(
            tp=config.tensor_model_parallel_size,
            pp=config.pipeline_model_parallel_size,
            cp=config.context_parallel_size,
            dp=world_size // model,
            ep=config.expert_model_parallel_size,
            expt_tp=config.expert_tp,
            tp_pp_dp=config.use_tp_pp_dp_mapping,
            instances=config.num_distributed_optimizer_instances,
            cp_inner=config.ranks_by_heads if config.nests_context else None,
        )
        inner = dims.ep * dims.expt_tp
        if (world_size // dims.pp) % inner:
            raise ValueError(
                f"world size / pp = {world_size // dims.pp} must be a multiple of "
                f"expert-model-parallel-size * expert-tensor-parallel-size = {inner}"
            )
        return dims

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expt_dp(self) -> int:
        return self.world_size // (self.pp * self.ep * self.expt_tp)

    @property
    def dense_order(self) -> tuple[str, ...]:
        """Axes of the mesh for dense layers, outermost first."""
        return ("dp", "pp", "cp", "tp") if self.tp_pp_dp else ("pp", "dp", "cp", "tp")

    @property
    def expert_order(self) -> tuple[str, ...]:
        """Axes of the expert mesh, outermost first. In each pipeline stage, the expert mesh contains the same ranks in
        the same order as the dense mesh, but divides them along other axes."""
        return ("pp", "expt_dp", "ep", "expt_tp")

    def shards(self, expert: bool) -> int:
        """Return the number of ranks over which the states of a parameter are sharded. `expert` states whether the
        parameter belongs to an expert."""
        return (self.expt_dp if expert else self.dp * self.cp) // self.instances

    def order_of(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes, outermost first, of the mesh that contains all of `axes`."""
        for order in (self.dense_order, self.expert_order):
            if set(axes) <= set(order):
                return order
        raise ValueError(f"no view of the mesh contains all of {axes}")

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group along `axes`."""
        return prod(getattr(self, axis) for axis in axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on every axis of the dense mesh and of the expert mesh."""
        found = self._unfold(rank, self.dense_order)
        in_stage = self._fold(found, ("dp", "cp", "tp"))
        return found | self._unfold(in_stage, ("expt_dp", "ep", "expt_tp"))

    def rank(self, **coords: int) -> int:
        """Return the rank at the given coordinates in one of the two meshes. The coordinate of an omitted axis is 0."""
        if self.order_of(tuple(coords)) == self.expert_order:
            in_stage = self._fold(coords, ("expt_dp", "ep", "expt_tp"))
            coords = self._unfold(in_stage, ("dp", "cp", "tp")) | {"pp": coords.get("pp", 0)}
        return self._fold(coords, self.dense_order)

    def _fold(self, coords: dict[str, int], order: tuple[str, ...]) -> int:
        index = 0
        for axis in order:
            index = index * self.size(axis) + coords.get(axis, 0)
        return index

    def _unfold(self, index: int, order: tuple[str, ...]) -> dict[str, int]:
        coords = {}
        for axis in reversed(order):
            index, coords[axis] = divmod(index, self.size(axis))
        return coords

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups along one or several axes of a mesh. The ranks in a group are in ascending order, and the
        groups are ordered by their first rank."""
        order = self.order_of(axes)
        inside = [range(self.size(axis)) if axis in axes else range(1) for axis in order]
        outside = [range(1) if axis in axes else range(self.size(axis)) for axis in order]
        groups = []
        for outer in product(*outside):
            corners = [map(add, outer, inner) for inner in product(*inside)]
            groups.append(tuple(sorted(self.rank(**dict(zip(order, corner, strict=True))) for corner in corners)))
        return sorted(groups)

    def instance_groups(self, *axes: str, parts: int | None = None) -> list[tuple[int, ...]]:
        """Divide each group of ranks along `axes` into one subgroup of consecutive ranks for each instance, and return
        all subgroups. An instance may be a node, for example."""
        size = self.size(*axes) // (parts or self.instances)
        return [ranks[i : i + size] for ranks in self.groups(*axes) for i in range(0, len(ranks), size)]

    def copy_groups(self, *axes: str, parts: int | None = None) -> list[tuple[int, ...]]:
        """Return groups that contain one rank of each instance: the first ranks of all instances, the second ranks of
        all instances, and so on. In contrast, `instance_groups` returns groups whose ranks all belong to the same
        instance."""
        size = self.size(*axes) // (parts or self.instances)
        return [ranks[i::size] for ranks in self.groups(*axes) for i in range(size)]
