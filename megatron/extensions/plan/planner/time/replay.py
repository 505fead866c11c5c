"""Predict the times of recorded events on one kind of device, for one placement of ranks. This module does not import
torch.

Large collectives use rings: a rank of n sends (n - 1) / n of the operand, and twice as much in an all-reduce. Within a
node, each rank has a separate link. Between nodes, the ranks of a node share the node's adapters, and all groups of the
node communicate at once.

Kernels run one after another on one stream. The collectives of each axis run one after another on a separate stream. A
collective starts when the preceding kernels are done. If the collective is not finished when its result is needed, the
remaining time is exposed. Hidden communication slows concurrent kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.plan.planner.device_file import DeviceError, DeviceFile, Link
from megatron.extensions.plan.planner.time.events import (
    Attention,
    Collective,
    Event,
    Gathered,
    Kernel,
    Product,
    Wait,
)

ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Number of times that a ring moves the whole operand, by kind of collective."""


@dataclass(frozen=True)
class Placement:
    """Placement of a group's ranks on nodes."""

    size: int
    in_node: int
    """Maximum number of the group's ranks that share a node."""

    stride: int = 1
    """Distance between neighbouring ranks of the group, in global rank order."""

    @property
    def crosses(self) -> bool:
        return self.in_node < self.size


@lru_cache(maxsize=4096)
def placement(dims: ParallelDims, axes: tuple[str, ...], ranks_per_node: int) -> Placement:
    """Return the placement of the group along `axes` that contains rank 0. All other groups along these axes have the
    same placement."""
    near, nearest = [0], list[int]()
    for axis in axes:  # rank numbers grow along each axis, so the first ranks are those on the first node
        ranks = (dims.rank(**{axis: place}) for place in range(dims.size(axis)))
        steps = list(takewhile(lambda rank: rank < ranks_per_node, ranks))
        near = [rank + step for rank in near for step in steps if rank + step < ranks_per_node]
        nearest += [dims.rank(**{axis: 1})] if dims.size(axis) > 1 else []
    return Placement(dims.size(*axes), max(1, len(near)), min(nearest, default=1))


def nested_placements(group: Placement, inner: int) -> tuple[Placement, Placement]:
    """Split a group into subgroups of `inner` consecutive ranks. Return two placements: the placement of a subgroup,
    and the placement of the ranks that have the same position in all subgroups."""
    rings = Placement(group.size // inner, max(1, -(-group.in_node // inner)), group.stride * inner)
    return Placement(inner, min(inner, group.in_node), group.stride), rings


@dataclass(frozen=True)
class Network:
    """Model that predicts the times of collectives on nodes with one kind of device."""

    device: DeviceFile
    ranks_per_node: int

    def seconds(self, kind: str, moved: float, group: Placement) -> float:
        """Return the time in seconds of a collective whose whole (unsharded) operand has `moved` bytes."""
        if group.size == 1:
            return 0.0
        if kind == "send":
            return self._message(moved, group)
        node, network = self._links(group)
        if kind == "all_to_all" or (kind == "reduce_scatter" and self.device.device_type == "cpu"):
            # In a reduce-scatter on CPUs, the ranks exchange parts, and each rank sums the parts that it receives
            # (`core.collectives`).
            near = moved * (group.in_node - 1) / group.size / _rate(node, kind)
            far = moved * (group.size - group.in_node) / group.size / self._rank_rate(network, kind)
            return max(near, far) + self._latency(group, 1)
        rounds = ROUNDS[kind]
        sent = rounds * moved * (group.size - 1) / group.size
        near = sent / _rate(node, kind) if group.in_node > 1 else 0.0
        far = sent / (group.in_node * self._rank_rate(network, kind)) if group.crosses else 0.0
        return max(near, far) + self._latency(group, rounds, ring=self.device.device_type == "cpu")

    def _message(self, moved: float, group: Placement) -> float:
        """Return the time of a message to the next rank of the group if every rank sends a message."""
        node, network = self._links(group)
        if not group.crosses:
            return moved / _rate(node, "send") + self._latency(group, 0) + 1e-6 * node.latency_us
        flows = max(1.0, self.ranks_per_node / group.in_node)
        rate = _rate(network, "send") * min(1.0, self.device.adapters_per_node / flows)
        return moved / rate + 1e-6 * (network.launch_us + network.latency_us)

    def _rank_rate(self, network: Link, kind: str) -> float:
        """Return the rate, in bytes per second, at which one rank sends to other nodes while all ranks of its node
        send."""
        return _rate(network, kind) * self.device.adapters_per_node / self.ranks_per_node

    def _latency(self, group: Placement, rounds: float, ring: bool = False) -> float:
        """Return the latency of a collective in seconds, assuming a ring within each node and a tree between nodes. If
        `ring` is True, as for gloo, a single ring passes through all ranks."""
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
                raise DeviceError(f"{self.device.name}: its device file has no link {name}, which this layout needs")
        return links["node"], links.get("network", links["node"])


def _rate(link: Link, kind: str) -> float:
    return 1e9 * link.gb_per_second * link.share.get(kind, 1.0)


SUBJECT_OF_AXIS = {
    "tp": "tp_communication",
    "tp_cp": "tp_communication",
    "expt_tp": "tp_communication",
    "cp": "cp_communication",
    "cp_inner": "cp_communication",
    "cp_outer": "cp_communication",
    "ep": "ep_communication",
    "expt_tp_ep": "ep_communication",
}

EXPERT_IMBALANCE = 1.1
"""Imbalance under expert parallelism: the number of tokens of the busiest rank's experts, divided by the mean over
ranks.

The value assumes that a loss or a bias balances the router, so that the experts of no rank receive over 10 % more
tokens than the mean.
"""


class Times(dict[str, float]):
    """Seconds by category."""

    def spend(self, subject: str, seconds: float) -> None:
        self[subject] = self.get(subject, 0.0) + seconds

    def add(self, more: Mapping[str, float], factor: float = 1.0) -> Times:
        for subject, seconds in more.items():
            self.spend(subject, factor * seconds)
        return self

    @property
    def total(self) -> float:
        return sum(self.values())


@dataclass(frozen=True)
class Replay:
    """Model that predicts the times of events on one kind of device, for one placement of process groups."""

    device: DeviceFile
    network: Network
    groups: Mapping[str, Placement]
    """Placement by axis."""

    host_us: float
    """Host time per launch in microseconds; 0 if a CUDA graph is replayed."""

    def run(self, events: Iterable[Event]) -> Times:
        """Return the time of a list of events by category. The category `launch` contains the host time in excess of
        the device time."""
        times = Times()
        clock = 0.0
        host = 0.0
        free: dict[str, float] = {}
        flying: dict[int, tuple[str, float, float]] = {}
        for event in events:
            if isinstance(event, Wait):
                subject, end, duration = flying.pop(event.number)
                exposed = max(0.0, end - clock)
                waited = exposed + self.device.overlap_slowdown * max(0.0, duration - exposed)
                times.spend(subject, waited)
                clock += waited
                continue
            host += 1e-6 * self.host_us
            if isinstance(event, Collective):
                duration = self.collective(event)
                end = max(clock, free.get(event.axis, 0.0)) + duration
                free[event.axis] = end
                flying[event.number] = SUBJECT_OF_AXIS.get(event.axis, "tp_communication"), end, duration
                continue
            subject, seconds = self.kernel(event)
            times.spend(subject, seconds)
            clock += seconds
        for subject, end, _ in flying.values():
            times.spend(subject, max(0.0, end - clock))
            clock = max(clock, end)
        times.spend("launch", max(0.0, host - clock))
        return times

    def collective(self, event: Collective) -> float:
        return self.network.seconds(event.kind, event.moved, self.groups[event.axis])

    def kernel(self, event: Kernel) -> tuple[str, float]:
        """Return the category of a kernel and its time in seconds, which includes the gap before the kernel."""
        device = self.device
        if isinstance(event, Product):
            together = event.batches * event.at_one_time
            us = device.gemm_us(event.precision, event.m, event.n, event.k, together) / event.at_one_time
            us /= device.sustained_share(event.precision)
            us = max(us, self._bytes(event.moved))
            us += device.epilogue_exposed * self._bytes(event.sums)
            if event.expert and "ep" in self.groups and self.groups["ep"].size > 1:
                us *= EXPERT_IMBALANCE
            return "matmul", 1e-6 * (us + device.launch_gap_us)
        if isinstance(event, Attention):
            us = device.attention_us(event.backend, event.width, event.flops, event.length, event.backward)
            us += device.hash_us(event.hashes)
            return "attention", 1e-6 * (us / device.sustained + device.launch_gap_us)
        if isinstance(event, Gathered):
            us = device.gather_us(event.flops, event.read, event.added)
            return "attention", 1e-6 * (us / device.sustained + device.launch_gap_us)
        return "element_wise", 1e-6 * (device.memory_us(event.moved) + device.launch_gap_us)

    def _bytes(self, size: int) -> float:
        return size / self.device.copy_tb_per_second / 1e6
