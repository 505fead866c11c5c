"""File objects that read only known ranges of a stored file. This module does not import torch."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

END = 64 << 10
"""Size in bytes of the pieces at both ends of a large range, which are fetched separately.

A zip archive has its directory at its end and its member names at its beginning.
"""

GAP = 64 << 10
"""Largest gap in bytes between two ranges that are fetched together. Reading a gap of this size takes less time than
sending a second request."""

HELD = 3
"""Number of pieces of a file kept in memory. Three pieces suffice to read an archive: its beginning, its end and the
current part of its data."""


class Range(NamedTuple):
    """Range of bytes [start, end) within a file."""

    start: int
    end: int


class SeekableFile(io.RawIOBase):
    """A file of known size that is readable at any position. Subclasses implement `readinto`."""

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
        """Read the rest of the file in a single request. The inherited method would send many requests of a few KiB
        each."""
        return self.read(max(0, self._size - self._at)) or b""


class RangedFile(SeekableFile):
    """Read-only file object for a file in a storage. The object fetches the bytes in `ranges`, and hardly any other
    bytes.

    Each byte is fetched about once if the ranges are read one after another, from front to back. Within a range, the
    order of the reads does not matter. Up to `HELD` pieces of the file are kept in memory.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, ranges: Iterable[Range], largest: int) -> None:
        """Open the file.

        Args:
            read: Function that takes (start, length) and returns these bytes of the file.
            size: Size of the file in bytes.
            ranges: Ranges that will be read.
            largest: Maximum number of bytes per request.
        """
        super().__init__(size)
        self._read = read
        inside = [Range(max(start, 0), min(end, size)) for start, end in sorted(ranges)]
        self._pieces = [*pieces(inside, largest)]
        self._held: dict[Range, bytes] = {}

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the whole buffer, unless the file ends."""
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
        """Return at most `length` bytes from the current position."""
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
            self._held[piece] = self._held.pop(piece)  # the most recently used piece
        return memoryview(self._held[piece])[self._at - piece.start :][:length]


def pieces(ranges: Iterable[Range], largest: int) -> Iterator[Range]:
    """Divide sorted byte ranges into pieces, each of which is fetched with one request.

    Small neighbouring ranges are combined into one piece. A range larger than `largest` is divided into a piece at each
    end, and several pieces in between.
    """
    together = Range(0, 0)
    for start, end in ranges:
        start = max(start, together.end)  # ranges may overlap
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
