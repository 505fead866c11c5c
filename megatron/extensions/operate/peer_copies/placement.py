"""Placement of copies: which hosts hold copies of which parts of the training state, and whether all parts survive a
loss of hosts. This module does not import torch.

Hosts form groups of N + 1. Each host keeps its own parts and copies of the parts of the others in its group, as in the
mixed placement of GEMINI (SOSP 2023). A loss is fatal only if it includes a whole group. If copies were spread over all
other hosts, the loss of nearly any pair of hosts would be fatal. Leftover hosts join the last group, in which copies go
to the next N hosts on a ring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Part:
    """Part of the training state that is copied as a whole."""

    writer: int
    """Rank that writes the part to a checkpoint, and sends it to other hosts."""

    replicas: tuple[int, ...]
    """Ranks that hold the same bytes, including the writer."""

    nbytes: int = 0


@dataclass(frozen=True)
class Held:
    """Copy of a part on a host."""

    host: str
    by: int | None
    """Rank on the host that has the same bytes and stores them itself; None if the writer sends them."""


def groups(hosts: Sequence[str], copies: int) -> list[tuple[str, ...]]:
    """Divide hosts, in order, into groups of `copies` + 1 hosts. The last group has up to 2 `copies` + 1 hosts. Fewer
    hosts than `copies` + 1 form one group."""
    size = copies + 1
    count = max(1, len(hosts) // size)
    starts = [number * size for number in range(count)]
    return [tuple(hosts[a:b]) for a, b in zip(starts, [*starts[1:], len(hosts)], strict=True)]


def partners(hosts: Sequence[str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return, for each host, the hosts that keep copies of its parts: `copies` hosts, or all others if there are
    fewer."""
    found = {}
    for group in groups(hosts, copies):
        for place, host in enumerate(group):
            found[host] = tuple(group[(place + way) % len(group)] for way in range(1, min(copies + 1, len(group))))
    return found


def place(host_of: Sequence[str], parts: Sequence[Part], copies: int) -> list[tuple[Held, ...]]:
    """Return the copies of each part: one on the writer's host, then `copies` on other hosts, each on a different host.

    Other ranks that hold the same bytes store them on their own hosts, preferably on partners of the writer's host; the
    writer sends only the missing copies, to its partners.
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
    """Return the number of survivable losses of `number` out of `hosts` hosts, and the number of all such losses. A
    loss is survivable if a copy of every part remains. Every part must have at least `number` copies."""
    fatal = {frozenset(held.host for held in part) for part in placed}
    assert all(len(each) >= number for each in fatal), "a smaller loss is already fatal"
    every = comb(hosts, number)
    return every - sum(len(each) == number for each in fatal), every


def stored_bytes(parts: Sequence[Part], placed: Sequence[tuple[Held, ...]]) -> Mapping[str, int]:
    """Return the bytes of one step that each host holds."""
    found: dict[str, int] = {}
    for part, copies in zip(parts, placed, strict=True):
        for held in copies:
            found[held.host] = found.get(held.host, 0) + part.nbytes
    return found


def sent_bytes(parts: Sequence[Part], placed: Sequence[tuple[Held, ...]]) -> Mapping[int, int]:
    """Return the bytes of one step that each rank sends. Ranks that send nothing are omitted."""
    found: dict[int, int] = {}
    for part, copies in zip(parts, placed, strict=True):
        if sent := part.nbytes * sum(held.by is None for held in copies):
            found[part.writer] = found.get(part.writer, 0) + sent
    return found


def duties(rank: int, placed: Sequence[tuple[Held, ...]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (index of the part, hosts to which it is sent) for the parts that a rank stores on its own host."""
    for number, copies in enumerate(placed):
        if any(held.by == rank for held in copies):
            is_writer = copies[0].by == rank
            yield number, tuple(held.host for held in copies if held.by is None) if is_writer else ()
