"""Command-line form of configuration fields. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar


@dataclass(frozen=True)
class Condition:
    """Condition on a configuration, stated in flags, which another flag requires or excludes."""

    text: str
    """`--x` (given, and neither off nor 0), `--x VALUE`, `--x above N`, or one of several, divided by " or ". Behind it
    may stand ": REASON" and "; REMEDY", which messages take over."""

    holds: Callable[[Any], bool] | None = None
    """True if it holds for a `RunConfig`, where the words of `text` do not say it by themselves."""

    @property
    def parts(self) -> tuple[str, str, str]:
        """The flags, with ": REASON" or nothing, and the remedy or nothing."""
        rule, _, remedy = self.text.partition("; ")
        flags, colon, why = rule.partition(": ")
        return flags, colon + why, remedy


Conditions = tuple[Condition, ...]


@dataclass(frozen=True)
class FlagSpec:
    """Command-line properties of a configuration field, besides its name and type."""

    name: str | None = None
    """Flag that replaces `--field-name`. For a bool that defaults to True, the flag that turns it off."""

    aliases: tuple[str, ...] = ()
    """Further spellings, with their dashes."""

    choices: Collection[str] | None = None
    """Legal values. The values of a registry grow as extensions are loaded."""

    many: bool = False
    """Takes one or more values; the field holds a tuple."""

    repeats: bool = False
    """Takes one value, and may be given several times; the field holds a tuple."""

    path: str | None = None
    """Kind of files that the value names: "local" for a mounted file system, "stored" for a path there or
    in a storage that an extension has registered, "url" if any URL is legal too."""

    empty_is_none: bool = False
    """True if an empty value means that the flag is not given, as in Megatron-LM. Other flags refuse an empty value."""

    writes: str | None = None
    """Kind of an output path, "folder" or "file". The run checks at start that it can be written."""

    names_code: Callable[[str], bool] | None = None
    """True if a value names files whose code is executed. Such a value must be on the command line. A configuration
    file may contain it only if a run of the same user has recorded it."""

    effective: str | None = None
    """For a field whose value another one may determine: the property of its section of the configuration that has the
    value. A checkpoint's is compared with the run's."""

    without_effect: bool = False
    """True if the field says how a model is computed or watched, and changes no result: a resumed run may give another
    value, and --use-checkpoint-args leaves it to the run."""

    may_change: bool = False
    """True if the field may be changed in the course of a run, as a learning rate may: a resumed run may give another
    value."""

    keeps_saved: bool = False
    """True if the default has changed: a resumed run that does not give the field keeps the checkpoint's value."""

    training_only: bool = False
    """True if the field affects how a model is trained or stored, but not its outputs: a run may choose it when it
    starts from weights alone."""

    first_run: bool = False
    """True if a first run needs the flag, so that --help shows it unless it is asked for others."""

    skips_steps: bool = False
    """True if the flag is a check of each step, which may skip the step."""

    chooses_trained: bool = False
    """True if the flag says which parameters are not trained."""

    same_setting_as: str | None = None
    """Field that sets the same in another way: a later source of flags replaces both if it has one of them."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    """Bounds of a number, or of each of several."""

    bounds_reason: str = ""
    """Why these are the bounds."""

    no_effect_without: Conditions = ()
    """Without one of these it has no effect, which is said and harmless."""

    off_without: Conditions = ()
    """Without one of these it has no effect, which is said, and it is turned off before other rules look at it."""

    needs: Conditions = ()
    """Without one of these it is refused."""

    excludes: Conditions = ()
    """Beside one of these it is refused."""

    def broken_bound(self, value: float) -> str | None:
        """The rule that a number breaks; None if it is within the bounds."""
        low = (self.at_least is None or value >= self.at_least) and (self.above is None or value > self.above)
        high = (self.at_most is None or value <= self.at_most) and (self.below is None or value < self.below)
        return None if low and high else f"must {self._range()}{self.bounds_reason and f', {self.bounds_reason}'}"

    def _range(self) -> str:
        low, first = ("above", self.above) if self.at_least is None else ("at least", self.at_least)
        high, last = ("below", self.below) if self.at_most is None else ("at most", self.at_most)
        if first is not None and last is not None:
            return f"be in {'[' if low == 'at least' else '('}{first}, {last}{']' if high == 'at most' else ')'}"
        if first is None:
            return f"be {high} {last}"
        return "not be negative" if (low, first) == ("at least", 0) else f"be {low} {first}"

    @property
    def bounded(self) -> bool:
        return (self.at_least, self.above, self.at_most, self.below) != (None,) * 4


def flag(default: Any, *aliases: str, **spec: Any) -> Any:
    """A dataclass field that carries a `FlagSpec` of these aliases and further fields.

    Conditions may be texts, and one alone needs no tuple."""
    for name in ("no_effect_without", "off_without", "needs", "excludes"):
        if name in spec:
            spec[name] = conditions(spec[name])
    return field(default=default, metadata={"flag": FlagSpec(aliases=aliases, **spec)})


def conditions(given: str | Condition | tuple[str | Condition, ...]) -> Conditions:
    """One condition or several, each as a text or whole."""
    several = given if isinstance(given, tuple) else (given,)
    return tuple(Condition(each) if isinstance(each, str) else each for each in several)


T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """One section of a configuration, which also carries the values of flags that extensions define."""

    extension_options: tuple[Any, ...] = field(default=(), kw_only=True, metadata={"flag": None})
    """Instances of the dataclasses of such flags."""

    def options(self, cls: type[T]) -> T:
        """The values of an extension's own flags, `cls` being their dataclass; without any its defaults."""
        return next((options for options in self.extension_options if isinstance(options, cls)), None) or cls()

    def without(self, field: str) -> Self:
        """The same with the defaults of the extension's flags that have this field."""
        others = (options for options in self.extension_options if not hasattr(options, field))
        return replace(self, extension_options=tuple(others))

    def with_options(self, *options: Any) -> Self:
        """The same with `options` in place of those of their classes."""
        classes = tuple(type(each) for each in options)
        others = (each for each in self.extension_options if not isinstance(each, classes))
        return replace(self, extension_options=(*others, *options))
