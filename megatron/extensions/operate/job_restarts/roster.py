"""Assign ranks to the processes that the launcher starts. The assignment depends only on the live processes and their
hosts. This module does not import torch.

A worker is a process of the launcher, identified by the number that the launcher assigns. A roster contains the worker
of each rank. Living workers that are not in the roster are spares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Roster = tuple[int, ...]
"""Tuple of the workers that run the ranks, indexed by rank."""


def spares_of(roster: Roster, living: Collection[int]) -> list[int]:
    """Return the spares: living workers that have no rank."""
    return sorted(set(living) - set(roster))


def lost_ranks(roster: Roster, living: Collection[int], host_of: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks whose workers are lost, keyed by the host of the lost worker."""
    found: dict[str, list[int]] = {}
    for rank, worker in enumerate(roster):
        if worker not in living:
            found.setdefault(host_of[worker], []).append(rank)
    return found


def replaced(roster: Roster, living: Collection[int], host_of: Mapping[int, str]) -> Roster | None:
    """Replace each lost worker in a roster with a spare. Return None if there are too few spares.

    A rank whose worker is alive keeps this worker. If possible, all ranks that one host has lost move to spares on a
    single host, so that these ranks still share a host. Spares on the host that has lost the ranks are preferred if
    there are enough. Otherwise, the ranks move to the host with the smallest sufficient number of spares.
    """
    free: dict[str, list[int]] = {}
    for worker in spares_of(roster, living):
        free.setdefault(host_of[worker], []).append(worker)
    lost = lost_ranks(roster, living, host_of)
    if sum(map(len, lost.values())) > sum(map(len, free.values())):
        return None
    found = list(roster)
    for host, ranks in sorted(lost.items(), key=lambda each: -len(each[1])):
        waiting = list(ranks)
        while waiting:
            taken = free[_best_host(free, host, len(waiting))]
            while waiting and taken:
                found[waiting.pop(0)] = taken.pop(0)
    return tuple(found)


def _best_host(free: Mapping[str, Sequence[int]], own: str, needed: int) -> str:
    """Return the host whose spares replace `needed` lost workers of the host `own`. If no host has enough spares,
    return the host with the most spares."""
    suits = [host for host, workers in free.items() if len(workers) >= needed]
    if own in suits:
        return own
    if suits:
        return min(suits, key=lambda host: len(free[host]))
    return max(free, key=lambda host: len(free[host]))


def fewer(roster: Roster, living: Collection[int], host_of: Mapping[int, str], size: int) -> Roster:
    """Return a roster of `size` living workers. Workers of the same host are consecutive, and hosts with more workers
    come first. On each host, workers with ranks come before spares."""
    order = [worker for worker in roster if worker in living] + spares_of(roster, living)
    by_host: dict[str, list[int]] = {}
    for worker in order:
        by_host.setdefault(host_of[worker], []).append(worker)
    hosts = sorted(by_host, key=lambda host: -len(by_host[host]))
    return tuple(worker for host in hosts for worker in by_host[host])[:size]
