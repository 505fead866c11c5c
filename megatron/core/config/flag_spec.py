"""How a field of a configuration appears on the command line. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FlagSpec:
    """How a field appears on the command line, where its name and type do not say it already."""

    name: str | None = None
    """Flag in place of `--field-name`; of a true-by-default bool the flag that turns it off."""

    aliases: tuple[str, ...] = ()
    """Further spellings, with their dashes."""

    choices: tuple[str, ...] | None = None
    """Legal values."""

    many: bool = False
    """Takes one or more values; the field holds a tuple."""


def flag(
    default: Any,
    *aliases: str,
    name: str | None = None,
    choices: Sequence[str] | None = None,
    many: bool = False,
) -> Any:
    """A dataclass field that carries a `FlagSpec`."""
    spec = FlagSpec(name, aliases, tuple(choices) if choices else None, many)
    return field(default=default, metadata={"flag": spec})
