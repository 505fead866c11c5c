"""Placement of copies: the hosts that hold copies of each part of the training state, and whether all parts survive a
loss of hosts. This module does not import torch.

Hosts form groups of N + 1. Each host keeps its own parts, and copies of the parts of the other hosts in its group. This
is the mixed placement of GEMINI (SOSP 2023). A loss of hosts is fatal only if it includes all hosts of a group. If
copies were spread over all other hosts, the loss of nearly any pair of hosts would be fatal. Hosts that remain join the
last group. In this group, each host's copies are on the next N hosts of a ring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Part:
    """Part of the training state, which is copied as a whole."""

    writer: int
    """Rank that writes the part to a checkpoint and sends the part to other hosts."""

    replicas: tuple[int, ...]
    """Ranks that hold the same bytes as the writer, including the writer."""

    nbytes: int = 0


@dataclass(frozen=True)
class Held:
    """Copy of a part on a host."""

    host: str
    by: int | None
    """Rank on this host that has the bytes of the part and stores them; None if the writer sends the part to this
    host."""


def groups(hosts: Sequence[str], copies: int) -> list[tuple[str, ...]]:
    """Divide hosts, in order, into groups of `copies` + 1 hosts. The last group may have up to 2 `copies` + 1 hosts. If
    there are fewer than `copies` + 1 hosts, they form one group."""
    size = copies + 1
    count = max(1, len(hosts) // size)
    starts = [number * size for number in range(count)]
    return [tuple(hosts[a:b]) for a, b in zip(starts, [*starts[1:], len(hosts)], strict=True)]


def partners(hosts: Sequence[str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return, for each host, the hosts that keep copies of its parts: `copies` hosts, or all other hosts of its group
    if the group has fewer."""
    found = {}
    for group in groups(hosts, copies):
        for place, host in enumerate(group):
            found[host] = tuple(group[(place + way) % len(group)] for way in range(1, min(copies + 1, len(group))))
    return found


def place(host_of: Sequence[str], parts: Sequence[Part], copies: int) -> list[tuple[Held, ...]]:
    """Return the copies of each part: one copy on the writer's host, followed by `copies` copies on different other
    hosts. Ranks on other hosts that hold the same bytes as the writer store copies on their own hosts. Partners of the
    writer's host are preferred. The writer sends only the remaining copies, to partners of the writer's host.
    """
    order = list(dict.fromkeys(host_of))
    to = partners(order, copies)
    return [_held(part, host_of, to[host_of[part.writer]], copies) for part in parts]


def _held(part: Part, host_of: Sequence[str], to: Sequence[str], copies: int) -> tuple[Held, ...]:
    home = host_of[part.writer]
    by = {home: part.writer}
    for rank in part.replicas:
        by.setdefault(host_of[rank], rank)
    wanted = [*(host for host in to if host in by), *(host for host in by if host != home and host not in to)]
    wanted += [host for host in to if host not in by]
    return tuple(Held(host, by.get(host)) for host in (home, *wanted[:copies]))


def survives(placed: Sequence[tuple[Held, ...]], lost: Collection[str]) -> bool:
    """Return True if a copy of every part remains after the loss of the hosts `lost`."""
    return all(any(held.host not in lost for held in part) for part in placed)


def survivable(placed: Sequence[tuple[Held, ...]], hosts: int, number: int) -> tuple[int, int]:
    """Count the ways to lose `number` out of `hosts` hosts: return how many of them are survivable, and how many there
    are in total. A loss is survivable if a copy of every part remains. The caller must ensure that every part has at
    least `number` copies."""
    fatal = {frozenset(held.host for held in part) for part in placed}
    assert all(len(each) >= number for each in fatal), "the loss of fewer hosts is already fatal"
    every = comb(hosts, number)
    return every - sum(len(each) == number for each in fatal), every


def stored_bytes(parts: Sequence[Part], placed: Sequence[tuple[Held, ...]]) -> Mapping[str, int]:
    """Return, for each host, the number of bytes in the copies of one step."""
    found: dict[str, int] = {}
    for part, copies in zip(parts, placed, strict=True):
        for held in copies:
            found[held.host] = found.get(held.host, 0) + part.nbytes
    return found


def sent_bytes(parts: Sequence[Part], placed: Sequence[tuple[Held, ...]]) -> Mapping[int, int]:
    """Return, for each rank, the number of bytes that the rank sends in one step. Ranks that send no bytes are
    omitted."""
    found: dict[int, int] = {}
    for part, copies in zip(parts, placed, strict=True):
        if sent := part.nbytes * sum(held.by is None for held in copies):
            found[part.writer] = found.get(part.writer, 0) + sent
    return found


def duties(rank: int, placed: Sequence[tuple[Held, ...]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield a pair for each part that a rank stores on its own host: the index of the part, and the hosts to which the
    rank sends the part."""
    for number, copies in enumerate(placed):
        if any(held.by == rank for held in copies):
            is_writer = copies[0].by == rank
            yield number, tuple(held.host for held in copies if held.by is None) if is_writer else ()
