"""A stored file of which only known ranges are read. This module does not import torch."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

END = 64 << 10
"""Bytes at both ends of a large range that are fetched on their own: a zip archive has its directory at its end, and
the names of its members at its beginning."""

GAP = 64 << 10
"""Bytes between two ranges that are fetched with them: a request of its own takes longer."""

HELD = 3
"""Pieces in memory: of an archive the beginning, the end, and a part of its data."""


class Range(NamedTuple):
    """Bytes `start` to `end` of a file, without `end`."""

    start: int
    end: int


class SeekableFile(io.RawIOBase):
    """A file of a known size, for reading at any position. A class that derives from this one writes `readinto`."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readall(self) -> bytes:
        """Reads the rest in one request, not in many of a few KiB."""
        return self.read(max(0, self._size - self._at)) or b""


class RangedFile(SeekableFile):
    """A stored file of `size` bytes whose `ranges` are read from front to back, each in any order, and hardly anything
    else.

    `read(start, length)` fetches bytes; each is fetched about once, in pieces of at most `largest`. `HELD` pieces are
    in memory.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, ranges: Iterable[Range], largest: int) -> None:
        super().__init__(size)
        self._read = read
        inside = [Range(max(start, 0), min(end, size)) for start, end in sorted(ranges)]
        self._pieces = [*pieces(inside, largest)]
        self._held: dict[Range, bytes] = {}

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fills the whole buffer, unless the file ends."""
        into = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(into) and self._at < self._size:
            data = self._some(len(into) - filled)
            if not data:
                break
            into[filled : filled + len(data)] = data
            filled += len(data)
            self._at += len(data)
        return filled

    def _some(self, length: int) -> memoryview:
        """Bytes from the position on, at most `length`."""
        found = bisect_right(self._pieces, self._at, key=lambda piece: piece.start)
        piece = self._pieces[found - 1] if found else Range(0, 0)
        if self._at >= piece.end:  # between the ranges
            end = self._pieces[found].start if found < len(self._pieces) else self._size
            return memoryview(self._read(self._at, min(length, end - self._at)))
        if piece not in self._held:
            while len(self._held) >= HELD:
                del self._held[next(iter(self._held))]
            self._held[piece] = self._read(piece.start, piece.end - piece.start)
        else:
            self._held[piece] = self._held.pop(piece)  # the one used last
        return memoryview(self._held[piece])[self._at - piece.start :][:length]


def pieces(ranges: Iterable[Range], largest: int) -> Iterator[Range]:
    """The pieces in which sorted ranges are fetched: several small ranges together, both ends of a range that is larger
    than `largest` on their own, and the rest of it in parts."""
    together = Range(0, 0)
    for start, end in ranges:
        start = max(start, together.end)  # as ranges may overlap
        if end <= start:
            continue
        near = together.end > 0 and start - together.end <= GAP
        if near and end - together.start <= largest:
            together = Range(together.start, end)
            continue
        if together.start < together.end:
            yield together
        if end - start <= largest:
            together = Range(start, end)
            continue
        ends = min(END, largest // 2)
        head, tail = start + ends, end - ends
        yield Range(start, head)
        yield from (Range(at, min(at + largest, tail)) for at in range(head, tail, largest))
        yield Range(tail, end)
        together = Range(end, end)
    if together.start < together.end:
        yield together
