"""Parser of messages from a socket or the rendezvous store. The messages are not trusted, because any process that can
reach the port can send messages.

Malformed messages are counted and ignored, and the first one is reported. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from typing import TypeVar, get_type_hints

T = TypeVar("T")

DIGITS = 18
"""Maximum number of digits of an integer in a message."""

SHOWN = 40
"""Maximum number of characters of a malformed text that a report shows."""


def parse_json(text: str | bytes) -> object:
    """Parse a JSON text. Raises ValueError if the text is invalid, nested too deeply, or not UTF-8."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def parse_record(kind: Callable[..., T], text: str | bytes) -> T:
    """Parse a JSON object to an instance of a dataclass.

    Raises ValueError unless the object has the fields of the class, with values of their types. A field of type object
    accepts every value."""
    values, types = parse_json(text), _types(kind)
    if not isinstance(values, dict):
        raise ValueError(f"it must be a JSON object, but is {_short(values)}")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    absent = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in absent if name not in values]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"it has an unknown field, {_short(name)}")
        if not _has_type(value, types[name]):
            raise ValueError(f"{name} is {_short(value)}, not of type {types[name].__name__}")
    return kind(**values)


def parse_integer(text: str) -> int:
    """Parse a string of decimal digits. Raises ValueError for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise ValueError(f"it must be a whole number, but is {_short(text)}")
    return int(text)


@cache
def _types(kind: Callable[..., object]) -> dict[str, type]:
    return get_type_hints(kind)


def _has_type(value: object, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 10**DIGITS
    return isinstance(value, kind) and not (isinstance(value, float) and kind is float and not math.isfinite(value))


def _short(value: object) -> str:
    """Format a value for an error message. For a list or dict, only the type is shown, because it may be large."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    text = ascii(value[:SHOWN]) if isinstance(value, str) else str(value)[:SHOWN]
    return text if len(str(value)) <= SHOWN else f"{text}..."


class Ignored:
    """Counter of malformed messages, which reports the first one on standard error."""

    def __init__(self, here: Callable[[], str], reports: bool = True) -> None:
        """`here` returns the name of this process, to be printed in reports. If `reports` is False, nothing is
        printed."""
        self.count = 0
        self._here, self._reports = here, reports

    def add(self, what: str, why: object) -> None:
        """Count a malformed message. `what` is the location of the message, and `why` is the error."""
        self.count += 1
        if self.count == 1:
            self._say(f"ignored {what}: {why}. Further messages are ignored and counted")

    def close(self) -> None:
        """If several messages were ignored, report their number."""
        if self.count > 1:
            self._say(f"ignored {self.count} malformed messages")

    def _say(self, text: str) -> None:
        if self._reports:
            with suppress(OSError):  # raised, for example, if the log is on a full disk
                print(f"{self._here()}: {text}", file=sys.stderr, flush=True)
