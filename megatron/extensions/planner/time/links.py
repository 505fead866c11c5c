"""Times of collectives, by their kind, their bytes and where the ranks of a group lie. No torch.

Large collectives follow the ring: a rank of n sends (n - 1) / n of the operand, twice that in an all-reduce. Within a
node each rank has a link of its own. Between nodes the ranks of a node share its adapters, and all of them are at work
at once: the group whose time is predicted, and those of the node's other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.planner.device_file import DeviceFile, Link

ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""How often a ring moves its operand."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group lie."""

    size: int
    in_node: int
    """Ranks of the group in a node that has most of them."""

    stride: int = 1
    """Distance of neighbours in the order of ranks."""

    @property
    def crosses(self) -> bool:
        return self.in_node < self.size


@lru_cache(maxsize=4096)
def placement(dims: ParallelDims, axes: tuple[str, ...], ranks_per_node: int) -> Placement:
    """Of the groups along axes, those of rank 0 standing for all."""
    near, nearest = [0], list[int]()
    for axis in axes:  # ranks grow with each coordinate: those of the node are at its first places
        ranks = (dims.rank(**{axis: place}) for place in range(dims.size(axis)))
        steps = list(takewhile(lambda rank: rank < ranks_per_node, ranks))
        near = [rank + step for rank in near for step in steps if rank + step < ranks_per_node]
        nearest += [dims.rank(**{axis: 1})] if dims.size(axis) > 1 else []
    return Placement(dims.size(*axes), max(1, len(near)), min(nearest, default=1))


@dataclass(frozen=True)
class Network:
    """Times of collectives on nodes of one kind of device."""

    device: DeviceFile
    ranks_per_node: int

    def seconds(self, kind: str, moved: float, group: Placement) -> float:
        """Time of a collective whose whole operand has `moved` bytes."""
        if group.size == 1:
            return 0.0
        if kind == "send":
            return self._message(moved, group)
        node, network = self._links(group)
        if kind == "all_to_all" or (kind == "reduce_scatter" and self.device.device_type == "cpu"):
            # On CPUs the ranks exchange their parts and add them up (`core.collectives`).
            near = moved * (group.in_node - 1) / group.size / _rate(node, kind)
            far = moved * (group.size - group.in_node) / group.size / self._rank_rate(network, kind)
            return max(near, far) + self._latency(group, 1)
        rounds = ROUNDS[kind]
        sent = rounds * moved * (group.size - 1) / group.size
        near = sent / _rate(node, kind) if group.in_node > 1 else 0.0
        far = sent / (group.in_node * self._rank_rate(network, kind)) if group.crosses else 0.0
        return max(near, far) + self._latency(group, rounds, ring=self.device.device_type == "cpu")

    def _message(self, moved: float, group: Placement) -> float:
        """A message to the next rank of the group, as all ranks send one."""
        node, network = self._links(group)
        if not group.crosses:
            return moved / _rate(node, "send") + self._latency(group, 0) + 1e-6 * node.latency_us
        flows = max(1.0, self.ranks_per_node / group.in_node)
        rate = _rate(network, "send") * min(1.0, self.device.adapters_per_node / flows)
        return moved / rate + 1e-6 * (network.launch_us + network.latency_us)

    def _rank_rate(self, network: Link, kind: str) -> float:
        """Bytes per second between nodes that one rank of a node has if all of them send."""
        return _rate(network, kind) * self.device.adapters_per_node / self.ranks_per_node

    def _latency(self, group: Placement, rounds: float, ring: bool = False) -> float:
        """Steps of a ring within the node, and of a tree between nodes, or of a `ring` through all of them (gloo)."""
        node, network = self._links(group)
        near = node.launch_us + rounds * (group.in_node - 1) * node.latency_us
        if not group.crosses:
            return 1e-6 * near
        steps = group.size - 1 if ring else math.ceil(math.log2(math.ceil(group.size / group.in_node)))
        return 1e-6 * (max(network.launch_us, near) + max(1.0, rounds) * steps * network.latency_us)

    def _links(self, group: Placement) -> tuple[Link, Link]:
        links: Mapping[str, Link] = self.device.links
        for name in ("node", "network") if group.crosses else ("node",):
            if name not in links:
                raise ValueError(f"{self.device.name}: its device file has no link {name}, which this layout needs")
        return links["node"], links.get("network", links["node"])


def _rate(link: Link, kind: str) -> float:
    return 1e9 * link.gb_per_second * link.share.get(kind, 1.0)
