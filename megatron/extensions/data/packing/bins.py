"""Best-fit decreasing: a heuristic that packs items into few bins of equal capacity. This module does not import torch.

Items are placed in descending order of length. Each item is placed into the fullest bin that has room for it (Ding et
al., "Fewer Truncations Improve Language Modeling", ICML 2024, section 3). Items of equal length are placed together, so
that a million documents are packed in a fraction of a second.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

Bins = deque[NDArray[np.int64]]


def best_fit_decreasing(lengths: NDArray, capacity: int) -> NDArray[np.int64]:
    """Return the bin number of each item, [n]. Bins are numbered from 0 in the order in which they are opened.

    Each item must have a length between 1 and `capacity`. If several bins are equally full, the next item goes into the
    bin that became that full first.
    """
    bins = np.empty(len(lengths), np.int64)
    if not len(lengths):
        return bins
    assert int(np.min(lengths)) >= 1 and int(np.max(lengths)) <= capacity
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    descending = np.asarray(lengths, np.int64)[order]
    firsts = np.flatnonzero(np.diff(descending, prepend=-1))
    room = _Room(capacity)
    for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), len(order)], strict=True):
        bins[order[first:stop]] = room.place(int(descending[first]), stop - first)
    return bins


class _Room:
    """Bins that can still receive items, grouped by their remaining capacity ("room")."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self.bins: defaultdict[int, Bins] = defaultdict(deque)
        """Maps each remaining capacity to the bins that have exactly this capacity left, sorted by the time at which
        the bins reached it."""

        self.rooms = 0
        """Bit mask of the remaining capacities: bit r is set if at least one bin has a remaining capacity of r."""

    def place(self, length: int, items: int) -> NDArray[np.int64]:
        """Place `items` items that have the same length, and return the bin number of each item, [items]."""
        found = []
        while items:
            above = self.rooms >> length
            room = length + (above & -above).bit_length() - 1 if above else self.capacity
            # A bin receives as many items as fit, because after each item it is the fullest bin with room for the next
            # one.
            each = room // length
            wanted = -(-items // each)
            taken = self._take(room, wanted) if above else self._open(wanted)
            count = min(items, len(taken) * each)
            whole, last = divmod(count, each)
            found.append(np.repeat(taken, each)[:count])
            self._keep(taken[:whole], room - each * length)
            self._keep(taken[whole:], room - last * length)
            items -= count
        return np.concatenate(found)

    def _open(self, wanted: int) -> NDArray[np.int64]:
        self.opened += wanted
        return np.arange(self.opened - wanted, self.opened)

    def _take(self, room: int, wanted: int) -> NDArray[np.int64]:
        """Remove up to `wanted` bins whose remaining capacity is `room`. Return these bins, sorted by the time at which
        they reached this capacity."""
        parts = self.bins[room]
        first = parts.popleft()
        taken, rest = first[:wanted], first[wanted:]
        if len(rest):
            parts.appendleft(rest)
        if not parts:
            self.rooms &= ~(1 << room)
        return taken

    def _keep(self, bins: NDArray[np.int64], room: int) -> None:
        if len(bins) and room:
            self.bins[room].append(bins)
            self.rooms |= 1 << room
