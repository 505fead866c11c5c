"""Flags of Megatron-LM and Megatron-DeepSpeed without a configuration field: what each one is read as.

The tables are in megatron_flags.toml, beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


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
    """What megatron_flags.toml says."""

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


@cache
def foreign_flags() -> ForeignFlags:
    """Reads the tables. Called only for a flag or value that no field has, so that most runs never read them."""
    import tomllib

    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    entries: dict[str, Entry] = {}
    for group in tables["no_effect"]:
        settings = {name: value for name, value in group.items() if name != "flags"}
        settings["values"] = tuple(settings.get("values", ()))
        if settings.get("arity") == "any":
            settings["arity"] = None
        entries |= dict.fromkeys(group["flags"], Accepted(**settings))
    for quiet, table in ((True, tables["usual"]), (False, tables["replaced"])):
        entries |= {flag: SameAs(flags, quiet) for flag, flags in table.items()}
    entries |= {flag: Exchange(*words) for flag, words in tables["exchanged"].items()}
    prefixes: dict[str, NotBuilt] = {}
    for group in tables["not_built"]:
        settings = {name: group[name] for name in ("feature", "remedy") if name in group}
        entry = NotBuilt(**settings, switch=tuple(group.get("switch", ())))
        entries |= dict.fromkeys(group.get("flags", ()), entry)
        prefixes |= dict.fromkeys(group.get("prefixes", ()), entry)
    values = (tables[name] for name in ("same_values", "values_not_built", "several_not_built", "examples"))
    return ForeignFlags(entries, prefixes, *values)
