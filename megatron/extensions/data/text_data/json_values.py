"""JSON parsing, and recognition of JSON lines. This module does not import torch."""

from __future__ import annotations

import json
from decimal import Decimal


def _integer(digits: str) -> int | Decimal:
    try:
        return int(digits)
    except ValueError:
        # `int` rejects texts with more digits than sys.get_int_max_str_digits() allows.
        return Decimal(digits)


_QUICK = json.JSONDecoder()
_PATIENT = json.JSONDecoder(parse_int=_integer)
"""JSON decoder without a limit on the length of integers. `json.loads` is faster, but rejects integers with more than
4,300 digits. This decoder is used only for JSON that `json.loads` rejects."""


def from_json(text: str) -> object:
    """Parse JSON that may contain integers of any length."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _PATIENT.decode(text)


def next_value(text: str, at: int) -> tuple[object, int]:
    """Return the JSON value that begins at position `at`, and the position after the value."""
    try:
        return _QUICK.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _PATIENT.raw_decode(text, at)


def is_indented(start: bytes) -> bool:
    """Return True if a file begins with an object that spans several lines. The first line of an indented file ends
    inside an object, and the second line is not a complete JSON value. If the second line is a complete JSON value, the
    file is not indented: it is a file of JSON lines whose first line is truncated."""
    lines = [line.strip() for line in start.split(b"\n")[:-1] if line.strip()][:2]
    if len(lines) < 2 or not lines[0].startswith(b"{"):
        return False
    first, second = (line.decode("utf-8", "replace") for line in lines)
    return _cut_at_the_end(first) and not _is_value(second)


def _cut_at_the_end(text: str) -> bool:
    """Return True if the text is an incomplete but otherwise valid JSON value."""
    try:
        from_json(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text)
    except (ValueError, RecursionError):
        pass
    return False


def _is_value(text: str) -> bool:
    try:
        from_json(text)
    except (ValueError, RecursionError):
        return False
    return True
