"""Flags of other programs: what each one is read as, by the tables that extensions register. No torch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from megatron.core.registry import NoFacts, Registry


@dataclass(frozen=True)
class Accepted:
    """A flag without effect."""

    reason: str
    """Why it has none; logged."""

    arity: int | None = 0
    """Number of values; None if any will do."""

    values: tuple[str, ...] = ()
    """If given, the only values without effect: any other one asks for `feature`."""

    feature: str = "something"

    @property
    def legal(self) -> str:
        return " or ".join(self.values)


@dataclass(frozen=True)
class SameAs:
    """A flag that stands for others."""

    flags: str
    """These flags; `{}` stands for its values."""

    quiet: bool = False
    """Whether it is a usual spelling, of which nothing need be said."""


@dataclass(frozen=True)
class Exchange:
    """A switch that replaces one value of a flag, given or the default, by another, whichever comes first. Any third
    value stays."""

    flag: str
    before: str
    """The value to replace, or "any"."""

    after: str

    def replaces(self, value: str) -> bool:
        return self.before in ("any", value)


@dataclass(frozen=True)
class NotBuilt:
    """A flag that asks for a feature that is not built."""

    feature: str
    remedy: str = "remove it"
    switch: tuple[str, ...] = ()
    """If given, the flags that ask for the feature, with a value where that does it: without one of them this flag is
    a setting without effect."""


Entry = Accepted | SameAs | Exchange | NotBuilt


@dataclass(frozen=True)
class ForeignFlags:
    """Tables of flags without a configuration field, and of other values."""

    entries: dict[str, Entry]
    prefixes: dict[str, NotBuilt]
    """Prefix of flags that no field and no entry has -> the feature that they ask for."""

    same_values: dict[str, dict[str, str]]
    """Flag -> its value -> the value that it is read as, with a reason behind a colon."""

    values_not_built: dict[str, dict[str, str]]
    """Flag -> its value -> the feature that it asks for."""

    several_not_built: dict[str, str]
    """Flag of one value -> the feature that several values ask for."""

    examples: dict[str, str]
    """Flag and value -> the file of examples/ that registers the value."""

    def stands_for(self, name: str, value: str = "") -> tuple[str, str]:
        """The flag and value that a flag with a value is read as: itself unless it stands for them."""
        entry = self.find(name, value)
        option, _, text = (entry.flags if isinstance(entry, SameAs) else f"{name} {value}").partition(" ")
        return option, text

    def find(self, name: str, value: str = "") -> Entry | None:
        """What a flag is that no field has, alone or with its first value; None if nobody knows it."""
        if entry := self.entries.get(f"{name} {value}"):
            return entry
        longest = max((prefix for prefix in self.prefixes if name.startswith(prefix)), key=len, default="")
        return self.entries.get(name) or self.prefixes.get(longest)

    def spellings(self) -> Iterator[str]:
        yield from self.entries


FLAG_TABLES: Registry[Callable[[], ForeignFlags], NoFacts] = Registry("table of flags", NoFacts)
"""`tables()`: the flags of another program. Read only for a flag or value that no field has."""

Given = Collection[str]
"""Every flag as it was given, alone and with its first value: also those that no field has."""

DIFFERENCES: Registry[Any, NoFacts] = Registry("program", NoFacts, "config, given")
"""`differences(config, given)`: lines about results of a resolved configuration, of flags as `given`, that differ from
those of this program under equal flags."""


def foreign_flags() -> ForeignFlags:
    """All tables in one."""
    return _all_of(tuple(FLAG_TABLES))


@cache
def _all_of(names: tuple[str, ...]) -> ForeignFlags:
    tables = [FLAG_TABLES[name]() for name in names]
    merged = {
        each.name: dict(ChainMap(*(getattr(table, each.name) for table in tables))) for each in fields(ForeignFlags)
    }
    return ForeignFlags(**merged)
