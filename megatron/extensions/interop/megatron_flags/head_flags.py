"""Flags of the latest Megatron-LM versions, and how this program treats these flags. This module does not import torch.

The table `flags_of_head.txt` in this folder lists the flags on Megatron-LM's branches main and dev, with one line for
each spelling of a flag. `tools/compare_megatron_flags.py` compares the table with the parser of a checkout and updates
the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.training.config.arguments import read_flags
from megatron.training.config.commands import options
from megatron.training.config.flags import spelling_table
from megatron.training.config.reading import FOREIGN_PROGRAMS, known_spelling

TABLE = Path(__file__).with_name("flags_of_head.txt")

SAME, TRANSLATED = "same", "translated"
"""Treatments of Megatron-LM flags. A `SAME` flag is also a flag of this program. A `TRANSLATED` flag is translated to
other flags."""

NO_EFFECT, REFUSED = "no effect", "refused"
"""Treatments of Megatron-LM flags. A `NO_EFFECT` flag is accepted, but only causes a notice. A `REFUSED` flag causes an
error that states the reason."""

UNKNOWN = "unknown"

EXAMPLES = {"int": "1", "float": "0.5", "bool": "true"}
"""Maps the name of a value type, such as int, to an example value."""


@dataclass(frozen=True)
class TheirFlag:
    """One spelling of a flag in Megatron-LM's parser, with the properties of the flag."""

    name: str

    default: str
    """Default value, in Python syntax."""

    type: str
    """Name of the function that parses a value of the flag, or "switch" if the flag has no value."""

    count: str
    """Number of values in argparse's notation: "1", "3", "*", "+" or "?". For flags without a value, the number is
    "0"."""

    choices: tuple[str, ...]
    """Permitted values. The tuple is empty if all values of the type are permitted."""

    @property
    def example(self) -> list[str]:
        """Example values for the flag, as command-line words."""
        if self.count == "0":
            return []
        value = self.choices[0] if self.choices else EXAMPLES.get(self.type, self.default.strip("'\""))
        return [value] * (int(self.count) if self.count.isdecimal() else 1)


@dataclass(frozen=True)
class Row:
    """Parsed line of the table in `flags_of_head.txt`."""

    flag: TheirFlag
    branches: str
    """Megatron-LM branches on which the flag exists, given as "main", "dev" or "main dev"."""

    treatment: str


def read_table(path: Path = TABLE) -> list[Row]:
    """Read a table of flags, and return its lines."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [
        Row(TheirFlag(name, default, kind, count, tuple(choices.split())), branches, treatment)
        for name, branches, treatment, default, kind, count, choices in lines
    ]


def table_text(parsers: Mapping[str, Sequence[TheirFlag]], sources: Iterable[str]) -> str:
    """Format a table of flags. `parsers` maps each branch of Megatron-LM to the flags of its argument parser. `sources`
    contains header lines that describe the parsers."""
    branches: dict[TheirFlag, str] = {}
    for branch, flags in parsers.items():
        for flag in flags:
            branches[flag] = f"{branches[flag]} {branch}" if flag in branches else branch
    columns = "name, branches, treatment here, default, type, number of values, choices"
    lines = [*(f"# {source}" for source in sources), f"# Columns, between tabs: {columns}"]
    for flag in sorted(branches, key=lambda each: (each.name, branches[each])):
        row = (flag.name, branches[flag], treatment(flag), flag.default, flag.type, flag.count, " ".join(flag.choices))
        lines.append("\t".join(row))
    return "\n".join(lines) + "\n"


def treatment(flag: TheirFlag) -> str:
    """Return how this program treats a Megatron-LM flag. Individual values of the flag may be treated differently, as
    described in `unknown_values`."""
    name = known_spelling(flag.name)
    if name in options() or name in spelling_table():
        return SAME
    reading = next((each for each in read_flags([name, *flag.example]).readings if each.given[0] == name), None)
    if reading is None or (reading.problem and reading.why.startswith("unknown flag")):
        return UNKNOWN
    if reading.problem and not reading.ours:
        return REFUSED
    return TRANSLATED if reading.ours else NO_EFFECT


def unknown_values(flag: TheirFlag) -> list[str]:
    """Return the unknown choices of a Megatron-LM flag. A choice is unknown if the flag of this program does not accept
    it and no translation table contains it."""
    name = known_spelling(flag.name)
    field = spelling_table().get(name)
    if field is None or not field[0].spec.choices:
        return []
    return [value for value in flag.choices if value not in field[0].spec.choices and not _is_known(name, value)]


def _is_known(name: str, value: str) -> bool:
    """Return True if this program accepts the value of a flag, or if the translation tables of another program contain
    it."""
    programs = [FOREIGN_PROGRAMS[program] for program in FOREIGN_PROGRAMS]
    if any(f"{name} {value}" in program.spellings() or program.feature(name, [value]) for program in programs):
        return True
    return not any(name in str(problem) for problem in read_flags([name, value]).problems)


def changes(before: Sequence[TheirFlag], now: Sequence[TheirFlag]) -> dict[str, list[str]]:
    """Compare the flags of two argument parsers. Return a dict with three entries, for new, removed and changed flags.
    Each entry maps a title to a list with one line per flag."""
    old, new = ({flag.name: flag for flag in flags} for flags in (before, now))
    return {
        "New": [f"{name}: {treatment(new[name])}" for name in new if name not in old],
        "Gone": [name for name in old if name not in new],
        "Changed": [
            f"{name}: {column} was {_shown(old[name], column)}, is {_shown(flag, column)}"
            for name, flag in new.items()
            if name in old
            for column in (field.name for field in fields(TheirFlag))
            if getattr(flag, column) != getattr(old[name], column)
        ],
    }


def _shown(flag: TheirFlag, column: str) -> str:
    value = getattr(flag, column)
    return (" ".join(value) or "any") if isinstance(value, tuple) else value
