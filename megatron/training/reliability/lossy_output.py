"""Standard output and standard error streams whose failures never end a run. Lines that cannot be written are dropped
and counted.

A log on a full disk, a closed terminal, or a missing reader must not end training. Characters that the encoding of the
output cannot represent are written as escape sequences. This module does not import torch.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

PATIENCE = 30.0
"""Seconds that a write waits for the reader of a non-blocking pipe."""

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LossyFile(io.RawIOBase):
    """Writer to a file descriptor. Data that cannot be written is dropped, and the dropped lines are counted. Once
    writing succeeds again, a line with the number of dropped lines is written to the file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.lost = 0
        """Number of dropped lines."""

        self.why = ""
        self._untold = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer) -> int:
        """Write data, and drop the data that cannot be written. Always return the size of `data`, so that callers do
        not retry."""
        content = bytes(data)
        if self._untold and self._left(f"\n{self.loss()}\n".encode()):
            self._drop(content)
            return len(content)
        self._untold = False
        if left := self._left(content):
            self._drop(left)
        return len(content)

    def loss(self) -> str:
        """Return a sentence with the number of lost lines and the reason why they were lost."""
        return f"{self.lost} line{'s' if self.lost > 1 else ''} of output could not be written: {self.why}"

    def _drop(self, content: bytes) -> None:
        self.lost += max(1, content.count(b"\n"))
        self._untold = True

    def _left(self, content: bytes) -> bytes:
        """Write as much of `content` as possible, and return the bytes that could not be written."""
        while content:
            try:
                content = content[os.write(self._descriptor, content) :]
            except BlockingIOError as error:
                self.why = error.strerror or str(error)
                if self._untold or not select.select([], [self._descriptor], [], PATIENCE)[1]:
                    break
            except OSError as error:
                self.why = error.strerror or str(error)
                break
        return content


@contextmanager
def lossy_output() -> Iterator[None]:
    """Replace stdout and stderr with lossy streams, which drop output that cannot be written.

    When the context exits, or the process exits through `before_exit`, each stream reports on the other stream how many
    of its lines were dropped.
    """
    before = sys.stdout, sys.stderr
    streams = [_lossy(stream) for stream in before]
    sys.stdout, sys.stderr = (new or old for new, old in zip(streams, before, strict=True))
    _at_exit.append(lambda: _tell_losses(streams))
    try:
        yield
    finally:
        flush_output()
        _at_exit.pop()
        sys.stdout, sys.stderr = before


_at_exit: list[Callable[[], None]] = []


def flush_output() -> None:
    """Flush both standard streams, and report how many lines they have lost. The function raises no exceptions."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for tell in _at_exit:
        tell()


@contextmanager
def told_if_unwritten(what: str) -> Iterator[None]:
    """Context manager that catches an OSError from writing the file `what`, and prints the error. The run continues
    without the file."""
    try:
        yield
    except OSError as error:
        print(f"{what} cannot be written: {error}", file=sys.stderr, flush=True)


def _lossy(stream: TextIO) -> io.TextIOWrapper | None:
    """Return a lossy stream that writes to the same file as `stream`, or None if `stream` has no file, as in a test."""
    try:
        stream.flush()
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    raw = LossyFile(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors="backslashreplace", line_buffering=True
    )


def _tell_losses(streams: list[io.TextIOWrapper | None]) -> None:
    for stream, other in zip(streams, reversed(streams), strict=True):
        raw = stream.buffer.raw if stream is not None and isinstance(stream.buffer, io.BufferedWriter) else None
        if isinstance(raw, LossyFile) and raw.lost and other is not None:
            name = "standard output" if stream is streams[0] else "standard error"
            other.write(f"{name}: {raw.loss()}\n")
            other.flush()
            raw.lost = 0
