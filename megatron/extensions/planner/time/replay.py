"""Replays a list of events on a device: seconds by what they are spent on. No torch.

Kernels follow each other on one stream; the collectives of an axis follow each other on another. A collective begins
when what is before it on the first stream is done, and what is left of it when its result is needed is exposed. What is
hidden slows the kernels beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.extensions.planner.device_file import DeviceFile
from megatron.extensions.planner.time.events import Attention, Collective, Event, Move, Product, Wait
from megatron.extensions.planner.time.links import Network, Placement

SUBJECT_OF_AXIS = {
    "tp": "tp_communication",
    "tp_cp": "tp_communication",
    "expt_tp": "tp_communication",
    "cp": "cp_communication",
    "ep": "ep_communication",
    "expt_tp_ep": "ep_communication",
}

EXPERT_IMBALANCE = 1.1
"""Tokens of the busiest rank's experts by those of the mean rank, under expert parallelism. Assumed: routers that are
balanced by a loss or a bias are within 10 % of even over the experts of a rank."""


class Times(dict[str, float]):
    """Seconds by subject."""

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
    """Evaluates events on one device and placement of groups."""

    device: DeviceFile
    network: Network
    groups: Mapping[str, Placement]
    """By axis."""

    host_us: float
    """Time of the host for each launch; 0 where a CUDA graph is replayed."""

    def run(self, events: Iterable[Event]) -> Times:
        """Times of a list of events; `launch` is what the host takes longer than the device."""
        times, clock, host = Times(), 0.0, 0.0
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

    def kernel(self, event: Product | Attention | Move) -> tuple[str, float]:
        """(subject, seconds) of a kernel, with the gap before it."""
        device = self.device
        if isinstance(event, Product):
            us = device.gemm_us(event.precision, event.m, event.n, event.k, event.batches) / device.sustained
            us = max(us, self._bytes(event.moved))
            us += device.epilogue_exposed * self._bytes(event.sums)
            if event.expert and "ep" in self.groups and self.groups["ep"].size > 1:
                us *= EXPERT_IMBALANCE
            return "matmul", 1e-6 * (us + device.launch_gap_us)
        if isinstance(event, Attention):
            us = device.attention_us(event.backend, event.width, event.flops, event.length, event.backward)
            us += device.hash_us(event.hashes)
            return "attention", 1e-6 * (us / device.sustained + device.launch_gap_us)
        return "element_wise", 1e-6 * (device.memory_us(event.moved) + device.launch_gap_us)

    def _bytes(self, size: int) -> float:
        return size / self.device.copy_tb_per_second / 1e6
