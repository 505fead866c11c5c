"""Differences between the clocks of hosts, measured by ping-pong over the store of the process groups.

Processes of one host share a clock (Linux: CLOCK_MONOTONIC), so one rank of each host compares its own with rank 0's.
It notes its time, sends, and notes its time again when the answer arrives, which carries the time of rank 0 in between.
If both ways take equally long, that time is the middle of the two; whatever they take, it lies between them, so half of
the round trip bounds the error. The shortest of some round trips counts (NTP, RFC 5905, section 10). Both messages pass
the store once, and neither rank asks it for a value before it has noted the time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROUND_TRIPS = 24

Clock = Callable[[], int]


@dataclass(frozen=True)
class Offset:
    """Offset from a host's clock to that of rank 0's host, measured at the time `at` of the host's own clock."""

    at: int
    nanoseconds: int = 0
    round_trip: int = 0
    """The shortest of those measured, in nanoseconds; half of it bounds the error."""


def host_identity() -> tuple[str, str]:
    """(name, identity of the running kernel): equal on ranks whose clocks are one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname(), socket.gethostname()
    spaces = Path("/proc/self/ns/time")
    space = os.readlink(spaces) if spaces.exists() else ""
    return socket.gethostname(), boot.read_text().strip() + space


def measure(
    store: dist.Store, rank: int, identities: Sequence[str], meeting: str, clock: Clock = time.perf_counter_ns
) -> Offset:
    """This rank's offset, if it is the first of its host; that of its host's first rank is what counts for others.

    Collective over the first ranks of all hosts, which call it with the same `identities` (of the ranks, in order).
    Keys of the store begin with `meeting`, which must be new.
    """
    firsts = [identities.index(identity) for identity in dict.fromkeys(identities)]
    if rank == 0:
        for other in firsts[1:]:
            _answer(store, f"{meeting}/{other}", clock)
        return Offset(clock())
    if rank in firsts:
        return _ask(store, f"{meeting}/{rank}", clock)
    return Offset(clock())


def _answer(store: dist.Store, key: str, clock: Clock) -> None:
    times = []
    for number in range(ROUND_TRIPS):
        store.wait([f"{key}/ping/{number}"])
        times.append(clock())
        store.set(f"{key}/pong/{number}", "")
    store.set(f"{key}/times", " ".join(map(str, times)))


def _ask(store: dist.Store, key: str, clock: Clock) -> Offset:
    sent, returned = [], []
    for number in range(ROUND_TRIPS):
        sent.append(clock())
        store.set(f"{key}/ping/{number}", "")
        store.wait([f"{key}/pong/{number}"])
        returned.append(clock())
    answered = map(int, store.get(f"{key}/times").decode().split())
    trips = zip(sent, returned, answered, strict=True)
    round_trip, middle, there = min((back - out, (out + back) // 2, there) for out, back, there in trips)
    return Offset(middle, there - middle, round_trip)


@dataclass(frozen=True)
class Alignment:
    """Maps the clock of a host to that of rank 0's: a straight line through two measurements."""

    first: Offset
    last: Offset

    def __call__(self, time_ns: int) -> int:
        elapsed = self.last.at - self.first.at
        share = (time_ns - self.first.at) / elapsed if elapsed > 0 else 0.0
        return time_ns + self.first.nanoseconds + round(share * (self.last.nanoseconds - self.first.nanoseconds))

    def as_json(self) -> dict[str, Any]:
        """Microseconds: the offset at the beginning, its drift until the end, and the bound of the error."""
        return {
            "offset_us": self.first.nanoseconds / 1e3,
            "drift_us": (self.last.nanoseconds - self.first.nanoseconds) / 1e3,
            "residual_us": max(self.first.round_trip, self.last.round_trip) / 2e3,
        }
