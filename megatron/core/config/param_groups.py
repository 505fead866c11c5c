"""Groups of parameters with a learning rate or weight decay of their own (--param-group). No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from math import isfinite

SHOWN = 5
"""Names of parameters that an error lists."""

SETTINGS = ("lr_mult", "wd_mult", "weight_decay")
"""Keys that an expression of --param-group can set."""


@dataclass(frozen=True)
class ParamGroup:
    """How the update of some parameters differs from that of the others."""

    lr_mult: float = 1.0
    """Factor of the learning rate."""

    wd_mult: float = 1.0
    """Factor of the scheduled weight decay; 0 for none."""

    weight_decay: float | None = None
    """Weight decay in place of the scheduled one."""

    decoupled: bool = False
    """Whether the learning rate is that of --decoupled-lr."""

    @property
    def decays(self) -> bool:
        """Whether there is any weight decay."""
        return bool(self.wd_mult if self.weight_decay is None else self.weight_decay)

    @property
    def order(self) -> tuple[float, ...]:
        """Key that sorts groups: those that decay first, then by their settings."""
        own = -1.0 if self.weight_decay is None else self.weight_decay
        return (not self.decays, self.decoupled, self.lr_mult != 1, self.lr_mult, self.wd_mult, own)

    def lr(self, lr: float, decoupled_lr: float | None) -> float:
        """Its learning rate, given that of the others and that of --decoupled-lr."""
        return self.lr_mult * (decoupled_lr if self.decoupled and decoupled_lr is not None else lr)

    def decay(self, weight_decay: float) -> float:
        """Its weight decay, given the scheduled one."""
        return self.wd_mult * weight_decay if self.weight_decay is None else self.weight_decay

    def __str__(self) -> str:
        rate = "decoupled lr" if self.decoupled else "lr"
        rate += f" x {self.lr_mult:g}" if self.lr_mult != 1 else ""
        if not self.decays:
            return f"{rate}, no weight decay"
        if self.weight_decay is not None:
            return f"{rate}, weight decay {self.weight_decay:g}"
        return f"{rate}, weight decay" + (f" x {self.wd_mult:g}" if self.wd_mult != 1 else "")


@dataclass(frozen=True)
class GroupRule:
    """One expression of --param-group: `settings` of the parameters in whose name `pattern` is found."""

    pattern: str
    settings: Mapping[str, float]

    def applied(self, group: ParamGroup, name: str) -> ParamGroup:
        """`group` as this rule changes it for the parameter `name`."""
        if not re.search(self.pattern, name):
            return group
        group = replace(group, lr_mult=self.settings.get("lr_mult", group.lr_mult))
        if (decay := self.settings.get("weight_decay")) is not None:  # none at all is one group, however it is written
            group = replace(group, wd_mult=float(decay > 0), weight_decay=decay or None)
        elif (factor := self.settings.get("wd_mult")) is not None:
            group = replace(group, wd_mult=factor, weight_decay=None)
        return group


@cache
def group_rule(text: str) -> GroupRule:
    """Reads 'REGEX key=value ...'. Raises ValueError, of the form `--param-group text: rule; remedy`."""
    where = f"--param-group {text}"
    example = "write for example --param-group 'norm lr_mult=0.1 weight_decay=0'"
    pattern, *assignments = text.split() or [""]
    if not pattern or not assignments:
        raise ValueError(f"{where}: needs a regular expression and at least one key=value; {example}")
    try:
        re.compile(pattern)
    except re.error as error:
        rule = f"cannot be read as a regular expression: {error}"
        raise ValueError(f"{where}: {rule}; use Python's regular expressions") from error
    settings = {}
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if key not in SETTINGS:
            raise ValueError(f"{where}: {key!r} is none of {', '.join(SETTINGS)}; {example}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{where}: {key} needs a number, not {value!r}; {example}") from None
        if not isfinite(number) or number < 0:
            raise ValueError(f"{where}: {key} must be finite and not negative; {example}")
        if key in settings:
            raise ValueError(f"{where}: sets {key} twice; keep one")
        settings[key] = number
    if {"wd_mult", "weight_decay"} <= settings.keys():
        rule = "sets one thing twice: wd_mult is a factor of the scheduled weight decay, weight_decay replaces it"
        raise ValueError(f"{where}: {rule}; keep one")
    return GroupRule(pattern, settings)


def unmatched(flag: str, value: str, pattern: str, names: Collection[str]) -> str | None:
    """The error of a pattern that is found in none of `names`: it shows the nearest ones."""
    if any(re.search(pattern, name) for name in names):
        return None
    words = re.sub(r"\\.|[^\w.]", " ", pattern.replace("\\.", ".")).strip()

    def likeness(name: str) -> float:
        return SequenceMatcher(None, words, name, autojunk=False).find_longest_match().size

    near = sorted(sorted(names), key=likeness, reverse=True)[:SHOWN]
    return f"{flag} {value}: matches no parameter; the nearest names are {', '.join(near)}"


def lines_of_groups(groups: Mapping[str, tuple[ParamGroup, int]]) -> Iterable[str]:
    """A line for each group of parameters, given name -> (group, elements)."""
    members: dict[ParamGroup, list[str]] = {}
    for name in sorted(groups):
        members.setdefault(groups[name][0], []).append(name)
    for group in sorted(members, key=lambda group: group.order):
        names = members[group]
        elements = sum(groups[name][1] for name in names)
        kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
        more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
        yield (
            f"parameter group ({group}): {len(names)} parameters, {elements:,} elements: "
            f"{', '.join(kinds[:SHOWN])}{more}"
        )
