"""Checks the sizes stated in a pickle before the pickle is read, because a few bytes may request gigabytes.

This module does not import torch.
"""

from __future__ import annotations

import pickle
import pickletools

_LINES = {"GLOBAL": 2, "INST": 2}
"""Number of lines of text that follow a text opcode. Text opcodes that are not listed here are followed by one line."""

_COUNTS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Size of the length prefix in bytes, keyed by the kind of pickle argument. Only arguments of variable length have a
length prefix."""

_SIZES = {ord(each.code): 0 if each.arg is None else each.arg.n for each in pickletools.opcodes}
_NAMES = {ord(each.code): each.name for each in pickletools.opcodes}


def check_sizes(data: bytes) -> None:
    """Check that no length and no memo index in a pickle is larger than the pickle itself.

    If a pickle states the length of a value, Python's unpickler allocates this number of bytes before it reads the
    value. The function raises pickle.UnpicklingError or, if the pickle is truncated, EOFError.
    """
    place, end = 0, len(data)
    while place < end:
        code = data[place]
        size = _SIZES.get(code)
        if size is None:
            raise pickle.UnpicklingError(f"byte {place} is {code:#04x}, which is not a pickle instruction")
        place += 1
        if size in _COUNTS:
            width = _COUNTS[size]
            stated = int.from_bytes(data[place : place + width], "little")
            place += width
            if stated > end - place:
                raise pickle.UnpicklingError(
                    f"{_NAMES[code]} states {stated:,} bytes, and {max(0, end - place):,} follow"
                )
            place += stated
        elif size == pickletools.UP_TO_NEWLINE:
            for _ in range(_LINES.get(_NAMES[code], 1)):
                start, place = place, data.find(b"\n", place) + 1
                if not place:
                    raise EOFError("the pickle ends within an instruction")
            if code == pickle.PUT[0]:
                _check_place(int(data[start : place - 1]), end)
        else:
            stated = int.from_bytes(data[place : place + size], "little")
            place += size
            if code == pickle.LONG_BINPUT[0]:
                _check_place(stated, end)
            elif code == pickle.FRAME[0] and stated > end - place:
                raise pickle.UnpicklingError(f"FRAME states {stated:,} bytes, and {max(0, end - place):,} follow")
        if code == pickle.STOP[0]:
            return
    raise EOFError("the pickle has no end")


def _check_place(place: int, most: int) -> None:
    """Raise an error if a memo index exceeds the size of the pickle. Each memo entry needs at least one byte, so a
    larger index is invalid."""
    if place > most:
        raise pickle.UnpicklingError(f"it asks for {place:,} remembered values, and has {most:,} bytes")
