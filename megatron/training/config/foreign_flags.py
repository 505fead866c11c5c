"""Tables of extensions about the flags of other programs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Protocol

from megatron.core.registry import NoFacts, Registry


class FlagTable(Protocol):
    """Table of another program's flags without a field here, and of its values that no field takes."""

    def spellings(self) -> Collection[str]:
        """The flags."""

    def read(self, reader: Any, name: str, texts: list[str]) -> bool:
        """Tells a `FlagReader` what such a flag or value is; returns False for what it does not know."""

    def feature(self, flag: str, texts: Sequence[str]) -> str | None:
        """The feature, which is not built, that these values of a field's flag ask for."""

    def examples(self, tokens: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
        """File of examples/ -> the flag, of some that are not registered, that asks for what it registers."""


FLAG_TABLES: Registry[Callable[[], FlagTable], NoFacts, ...] = Registry("table of flags", NoFacts)
"""`table()`: the flags of another program. Read only for a flag or value that no field has."""

Given = Collection[str]
"""Every flag as it was given, alone and with its first value: also those that no field has."""

DIFFERENCES: Registry[Any, NoFacts, ...] = Registry("program", NoFacts, "config, given")
"""`differences(config, given)`: lines about results of a resolved configuration, of flags as `given`, that differ from
those of this program under equal flags."""


def flag_tables() -> tuple[FlagTable, ...]:
    """All tables."""
    return _tables(tuple(FLAG_TABLES))


@cache
def _tables(names: tuple[str, ...]) -> tuple[FlagTable, ...]:
    return tuple(FLAG_TABLES[name]() for name in names)
