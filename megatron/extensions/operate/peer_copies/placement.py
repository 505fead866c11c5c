"""Placement of copies: the hosts that hold copies of each part of the training state, and whether all parts survive a
loss of hosts. This module does not import torch.

If --peer-copies is N, hosts form groups of N + 1 hosts. Each host keeps its own parts, and copies of the parts of the
other hosts in its group. This is the mixed placement of GEMINI (SOSP 2023). Training state is lost only if all hosts of
one group are lost. If copies were spread over all other hosts, the loss of nearly any pair of hosts would lose training
state. If the number of hosts is not a multiple of N + 1, the last group is larger. The hosts of this group form a ring,
and each host's copies are on the next N hosts of the ring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class Part:
    """Part of the training state. All bytes of a part are copied together."""

    writer: int
    """Rank that writes this part of the training state to a checkpoint and sends it to other hosts."""

    replicas: tuple[int, ...]
    """All ranks that hold the bytes of this part of the training state, including `writer`."""

    nbytes: int = 0


@dataclass(frozen=True)
class Held:
    """Copy of a part of the training state on one host."""

    host: str
    by: int | None
    """Rank on the host `host` that stores the copy, because it holds the bytes of the part itself. None if no rank on
    this host holds the bytes, so that `Part.writer` sends them."""


def groups(hosts: Sequence[str], copies: int) -> list[tuple[str, ...]]:
    """Divide hosts, in order, into groups of `copies` + 1 hosts. The remaining hosts join the last group. If there are
    fewer than `copies` + 1 hosts, they form one group."""
    size = copies + 1
    count = max(1, len(hosts) // size)
    starts = [number * size for number in range(count)]
    return [tuple(hosts[a:b]) for a, b in zip(starts, [*starts[1:], len(hosts)], strict=True)]


def partners(hosts: Sequence[str], copies: int) -> dict[str, tuple[str, ...]]:
    """Map each host to `copies` other hosts of its group (`groups`), which keep copies of the host's parts of the
    training state. If a group has too few hosts, all other hosts of the group keep copies."""
    found = {}
    for group in groups(hosts, copies):
        for place, host in enumerate(group):
            found[host] = tuple(group[(place + way) % len(group)] for way in range(1, min(copies + 1, len(group))))
    return found


def place(host_of: Sequence[str], parts: Sequence[Part], copies: int) -> list[tuple[Held, ...]]:
    """Choose the hosts that keep a copy of each part of the training state. The first copy is on the writer's host, and
    `copies` more are on other hosts. Hosts on which another rank holds the bytes of the part are chosen first, because
    this rank can store the copy without a transfer. Among these hosts, the partners of the writer's host (`partners`)
    come first. If more copies are needed, the writer sends them to the other partners of its host.
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
    """Return True if a copy of every part of the training state remains after the loss of the hosts `lost`."""
    return all(any(held.host not in lost for held in part) for part in placed)


def survivable(placed: Sequence[tuple[Held, ...]], hosts: int, number: int) -> tuple[int, int]:
    """Consider all sets of `number` hosts out of `hosts` hosts. Return two numbers: how many of these sets can be lost
    while every part of the training state still has a copy, and how many sets there are. Every part must have at least
    `number` copies."""
    fatal = {frozenset(held.host for held in part) for part in placed}
    assert all(len(each) >= number for each in fatal), "the loss of fewer hosts is already fatal"
    every = comb(hosts, number)
    return every - sum(len(each) == number for each in fatal), every


def stored_bytes(parts: Sequence[Part], placed: Sequence[tuple[Held, ...]]) -> Mapping[str, int]:
    """Return, for each host, the number of bytes that the host stores in the copies of one step."""
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
    """Yield a pair for each part of the training state that a rank stores on its own host. The pair consists of the
    index of the part in `placed` and the hosts to which the rank sends the part. If the rank is not the writer of the
    part, the rank sends it to no host."""
    for number, copies in enumerate(placed):
        if any(held.by == rank for held in copies):
            is_writer = copies[0].by == rank
            yield number, tuple(held.host for held in copies if held.by is None) if is_writer else ()
