"""How a field of a configuration appears on the command line. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar


@dataclass(frozen=True)
class FlagSpec:
    """How a field appears on the command line, where its name and type do not say it already."""

    name: str | None = None
    """Flag in place of `--field-name`; of a true-by-default bool the flag that turns it off."""

    aliases: tuple[str, ...] = ()
    """Further spellings, with their dashes."""

    choices: Collection[str] | None = None
    """Legal values; a registry's change as extensions add to it."""

    many: bool = False
    """Takes one or more values; the field holds a tuple."""

    repeats: bool = False
    """Takes one value, and may be given several times; the field holds a tuple."""

    path: str | None = None
    """Of a value that names files: "local" if they lie on a mounted file system, "url" if URLs do as well."""


def flag(default: Any, *aliases: str, **spec: Any) -> Any:
    """A dataclass field that carries a `FlagSpec` of these aliases and further fields."""
    return field(default=default, metadata={"flag": FlagSpec(aliases=aliases, **spec)})


T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """One section of a configuration, which also carries the values of flags that extensions define."""

    extension_options: tuple[Any, ...] = field(default=(), kw_only=True, metadata={"flag": None})
    """Instances of the dataclasses of such flags."""

    def options(self, cls: type[T]) -> T:
        """The values of an extension's own flags, `cls` being their dataclass; without any its defaults."""
        return next((options for options in self.extension_options if isinstance(options, cls)), None) or cls()
