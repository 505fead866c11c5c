"""Interpretation of Megatron-LM's flags that have no configuration field in this program. This module does not import
torch.

The tables are in megatron_flags.toml, in this folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.training.config.commands import options
from megatron.training.config.flags import home_of, is_registered, spelling_table
from megatron.training.config.reading import FlagReader, Reading, tokens_of
from megatron.training.config.run_config import RunConfig


@dataclass(frozen=True)
class Accepted:
    """Flag of another program that is accepted without effect."""

    reason: str
    """Reason why the flag has no effect. The reason is logged."""

    arity: int | None = 0
    """Number of values that the flag accepts. None means any number."""

    values: tuple[str, ...] = ()
    """Values of the flag that have no effect. Any other value of the flag requests the unsupported feature `feature`.
    If the tuple is empty, no value of the flag has an effect."""

    feature: str = "something"


@dataclass(frozen=True)
class SameAs:
    """Flag of another program that is translated to flags of this program."""

    flags: str
    """Translation of the flag into other flags. `{}` is replaced by the values of the flag."""

    quiet: bool = False
    """True if the translation is not logged, because the flag is a common spelling."""

    cost: str = ""
    """Disadvantage of the translated flags compared with the original flag. The disadvantage is logged."""


@dataclass(frozen=True)
class Exchange:
    """Flag that has no value itself, but changes the value of another flag from `before` to `after`. It makes no
    difference whether the user set the value `before` or `before` is the default. Any other value is kept. The order of
    the flags is irrelevant."""

    flag: str
    before: str
    """Value of the flag that is replaced. "any" means that every value is replaced."""

    after: str


@dataclass(frozen=True)
class NotBuilt:
    """Flag that requests an unsupported feature."""

    feature: str
    remedy: str = "remove it"
    switch: tuple[str, ...] = ()
    """Other flags that request the feature, given as "FLAG" or "FLAG VALUE". If the tuple is not empty and the user
    sets none of these other flags, this flag has no effect, because it only configures the feature."""

    beside: tuple[str, ...] = ()
    """Flags that request the same feature as this flag. If the user also sets one of these other flags, this flag has
    no effect."""

    reason: str = ""
    """Reason why this flag has no effect if the user also sets a flag in `beside`."""


Entry = Accepted | SameAs | Exchange | NotBuilt


@dataclass(frozen=True)
class ForeignFlags:
    """Tables that define how this program treats another program's flags. The tables cover flags that have no
    configuration field in this program, and flag values that this program does not support."""

    entries: dict[str, Entry]
    prefixes: dict[str, NotBuilt]
    """Maps a flag prefix to an unsupported feature. An entry applies to all flags with the prefix that have neither a
    configuration field nor an entry in `entries`."""

    same_values: dict[str, dict[str, str]]
    """Maps a flag to a table of values that have a different name in this program. The table maps each value to
    "TRANSLATED: REASON"."""

    values_not_built: dict[str, dict[str, str]]
    """Maps a flag to a table of its unsupported values. The table maps each value to the unsupported feature that the
    value requests."""

    several_not_built: dict[str, str]
    """Maps each flag that accepts only one value in this program to a feature. Passing several values would request
    this unsupported feature."""

    registered_by: dict[str, str]
    """Maps text of the form "FLAG VALUE" to the file in examples/ that adds support for the value."""

    def find(self, name: str, *texts: str) -> Entry | None:
        """Return the table entry of a flag that has no configuration field. The lookup tries the flag with all its
        values, then with its first value, and then without values. If there is no such entry, return the entry of the
        longest matching prefix in `prefixes`, or None."""
        for words in (texts, texts[:1]):
            if words and (entry := self.entries.get(" ".join([name, *words]))):
                return entry
        longest = max((prefix for prefix in self.prefixes if name.startswith(prefix)), key=len, default="")
        return self.entries.get(name) or self.prefixes.get(longest)

    def spellings(self) -> Collection[str]:
        return self.entries

    def differences(self, config: RunConfig, given: Collection[str]) -> Iterable[str]:
        return ()

    def feature(self, flag: str, texts: Sequence[str]) -> str | None:
        if len(texts) > 1:
            return self.several_not_built.get(flag)
        return self.values_not_built.get(flag, {}).get(texts[0])

    def examples(self, tokens: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
        needed: dict[str, str] = {}
        for name, texts in tokens:
            entry = self.find(name, *texts)
            stands_for = entry.flags if isinstance(entry, SameAs) else " ".join([name, *texts[:1]])
            option, _, value = stands_for.partition(" ")
            file = self.registered_by.get(f"{option} {value}")
            if file is not None and not is_registered(option, value):
                needed[file] = " ".join([name, *texts[:1]])
        return needed

    def read(self, reader: FlagReader, name: str, texts: list[str]) -> bool:
        entry = self.find(name, *texts)
        if name in spelling_table():
            if not isinstance(entry, SameAs):
                return self._read_other_values(reader, name, texts)
        elif home_of(name) is not None:
            return False
        if entry is None:
            return False
        if isinstance(entry, SameAs):
            self._read_as(reader, name, texts, entry)
        elif isinstance(entry, Exchange):
            if texts:
                reader.refuse(name, texts, "takes no value", "write the flag alone")
            reader.exchanges.append(partial(_exchange, reader, name, entry))
        elif isinstance(entry, NotBuilt):
            if entry.switch or entry.beside:
                reader.settings.append(partial(_judge, reader, name, texts, entry))
            else:
                _not_built(reader, name, texts, entry)
        elif entry.arity is not None and len(texts) != entry.arity:
            rule = f"takes {'one value' if entry.arity else 'no value'}"
            reader.refuse(name, texts, rule, "correct it, or remove the flag: it has no effect")
        elif entry.values and texts[0] not in entry.values:
            legal = " or ".join(entry.values)
            reader.refuse(name, texts, f"asks for {entry.feature}, which is not implemented", f"use {legal}")
        else:
            _no_effect(reader, name, texts, entry.reason)
        return True

    def _read_other_values(self, reader: FlagReader, name: str, texts: list[str]) -> bool:
        """Translate flag values from another program's spelling to this program's spelling. Return False if no value
        was translated."""
        flag, _ = spelling_table()[name]
        ours, same = list(texts), self.same_values.get(flag.name, {})
        for place, text in enumerate(texts):
            if text in same and text not in (flag.spec.choices or ()):
                ours[place], _, why = same[text].partition(": ")
                reader.notes.append(f"{name} {text} is read as {ours[place]}{why and f': {why}'}")
        if ours != texts:
            reader.read_field(name, ours, given=texts)
        return ours != texts

    def _read_as(self, reader: FlagReader, name: str, texts: list[str], entry: SameAs) -> None:
        """Translate a flag to other flags, and read these flags. A flag whose translation does not contain `{}` accepts
        no value."""
        words = entry.flags.split()
        # `fixed` is True if `entry` is the entry for this value of the flag, whose key is "FLAG VALUE".
        fixed = self.entries.get(" ".join([name, *texts[:1]])) is entry
        fixed &= bool(texts)
        if ("{}" in words) != bool(texts) and not fixed:
            rule = "takes a value" if "{}" in words else "takes no value"
            reader.refuse(name, texts, rule, f"or use {entry.flags}")
            return
        ours = [text for word in words for text in (texts if word == "{}" else [word])]
        before = len(reader.problems)
        for each, values in tokens_of(ours):
            reader.read_known(each, values)
            if each not in options():
                reader.readings.pop()
        why = "" if entry.quiet else entry.cost or ("another name" if len(words) <= 2 else "shorthand for these flags")
        reader.readings.append(Reading((name, *texts), tuple(ours), why, len(reader.problems) > before))
        if not entry.quiet:
            reader.notes.append(str(reader.readings[-1]) + (f": {entry.cost}" if entry.cost else ""))


def _no_effect(reader: FlagReader, name: str, texts: Sequence[str], reason: str) -> None:
    reader.readings.append(Reading((name, *texts), (), reason))
    reader.notes.append(str(reader.readings[-1]))


def _not_built(reader: FlagReader, name: str, texts: Sequence[str], entry: NotBuilt) -> None:
    reader.refuse(name, texts, f"asks for {entry.feature}, which is not implemented", entry.remedy)
    reader.suspects |= {word.strip(",") for word in entry.remedy.split() if word.startswith("--")}


def subject(feature: str) -> str:
    """Shorten the description of an unsupported feature to its name. For example, "this variant of fp8" becomes
    "fp8"."""
    return feature.removeprefix("this setting of ").removeprefix("this variant of ")


def _judge(reader: FlagReader, name: str, texts: Sequence[str], entry: NotBuilt) -> None:
    """Accept or refuse a flag of an unsupported feature, depending on the other flags. If no other flag requests the
    feature, a flag that only configures the feature is accepted without effect. A flag is also accepted without effect
    if the user sets one of the flags in `entry.beside`, which request the same feature."""
    if reader.spelled & set(entry.beside):
        _no_effect(reader, name, texts, entry.reason)
    elif not entry.switch or reader.spelled & set(entry.switch):
        _not_built(reader, name, texts, entry)
    else:
        feature = subject(entry.feature)
        _no_effect(reader, name, texts, f"it is a setting of {feature}, which {entry.switch[0]} asks for")


def _exchange(reader: FlagReader, name: str, entry: Exchange) -> None:
    """Apply a flag that has no value itself, but changes the value of another flag as `entry` describes."""
    flag, _ = spelling_table()[entry.flag]
    value = reader.values.get(flag.field, flag.default)
    if entry.before not in ("any", value):
        _no_effect(reader, name, (), f"{entry.flag} is {value}")
        return
    if flag.field in reader.values and value != entry.after:
        reader.notes.append(f"{name} makes {entry.flag} {value} {entry.after}")
    reader.values[flag.field] = entry.after
    reader.readings.append(Reading((name,), (entry.flag, entry.after)))


def read_tables() -> ForeignFlags:
    """Read the tables in megatron_flags.toml."""
    tables = tomllib.loads(Path(__file__).with_name("megatron_flags.toml").read_text(encoding="utf-8"))
    entries: dict[str, Entry] = {}
    for group in tables["no_effect"]:
        settings = {name: value for name, value in group.items() if name != "flags"}
        settings["values"] = tuple(settings.get("values", ()))
        if settings.get("arity") == "any":
            settings["arity"] = None
        entries |= dict.fromkeys(group["flags"], Accepted(**settings))
    for quiet, table in ((True, tables["usual"]), (False, tables["replaced"])):
        entries |= {name: SameAs(flags, quiet, tables["costs"].get(name, "")) for name, flags in table.items()}
    entries |= {name: Exchange(*words) for name, words in tables["exchanged"].items()}
    prefixes: dict[str, NotBuilt] = {}
    for group in tables["not_built"]:
        settings = {name: group[name] for name in ("feature", "remedy", "reason") if name in group}
        entry = NotBuilt(**settings, switch=tuple(group.get("switch", ())), beside=tuple(group.get("beside", ())))
        entries |= dict.fromkeys(group.get("flags", ()), entry)
        prefixes |= dict.fromkeys(group.get("prefixes", ()), entry)
    values = (tables[name] for name in ("same_values", "values_not_built", "several_not_built", "examples"))
    return ForeignFlags(entries, prefixes, *values)
