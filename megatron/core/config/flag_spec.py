"""Specifications of the command-line flags of configuration fields. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar


@dataclass(frozen=True)
class Condition:
    """Condition that a flag requires or excludes, for example that another flag is given."""

    text: str
    """Text of the condition, in one of these forms: `--x` (the flag is given, and is neither off nor 0), `--x VALUE`,
    `--x above N`, or several of these joined by " or ". The text may end with ": REASON" and "; REMEDY", which messages
    quote."""

    holds: Callable[[Any], bool] | None = None
    """Predicate that decides whether a `RunConfig` meets the condition. If `holds` is None, `text` is evaluated
    instead."""

    @property
    def parts(self) -> tuple[str, str, str]:
        """Split `text` into three strings: the flags, the reason with its leading ": ", and the remedy. If `text` lacks
        one of these parts, the corresponding string is empty."""
        rule, _, remedy = self.text.partition("; ")
        flags, colon, why = rule.partition(": ")
        return flags, colon + why, remedy


Conditions = tuple[Condition, ...]


@dataclass(frozen=True)
class FlagSpec:
    """Command-line properties of a configuration field, other than its name and type."""

    name: str | None = None
    """Name of the flag, if it is not `--field-name`. For a bool that defaults to True, `name` is the flag that turns
    the bool off."""

    aliases: tuple[str, ...] = ()
    """Alternative spellings of the flag, with their dashes."""

    choices: Collection[str] | None = None
    """Permitted values of the flag. If the choices are the names in a registry, loaded extensions can add further
    choices."""

    many: bool = False
    """True if the flag takes one or more values; the field is then a tuple."""

    repeats: bool = False
    """True if the flag takes one value and may be given several times; the field is then a tuple."""

    path: str | None = None
    """Kind of path that the flag accepts, if its value is a path. "local" is a path in a mounted file system. "stored"
    also permits a path in a storage that an extension has registered, and "url" also permits any URL."""

    empty_is_none: bool = False
    """True if an empty value means that the flag is not given, as in Megatron-LM. If False, an empty value is an
    error."""

    writes: str | None = None
    """Kind of output to which the flag's path refers, "folder" or "file". At its start, the run checks that this path
    can be written."""

    names_code: Callable[[str], bool] | None = None
    """Predicate that decides whether a value of the flag names code that the run executes. The flag accepts such a
    value only on the command line, or from a configuration file of a recorded run of the same user."""

    effective: str | None = None
    """Name of the property with the effective value, if another field may override the value of this field. When a
    checkpoint is loaded, the effective values of the checkpoint and the run are compared."""

    without_effect: bool = False
    """True if the field affects only how a model is computed or monitored, but not the results. A resumed run may
    change such a field, and --use-checkpoint-args does not restore its value."""

    may_change: bool = False
    """True if a resumed run may change the value, for example if it is a learning rate."""

    keeps_saved: bool = False
    """True if the default has changed between versions. If the command line of a resumed run does not set the flag, the
    run keeps the value in its checkpoint."""

    training_only: bool = False
    """True if the field affects how a model is trained or stored, but not the model's outputs. A run that loads only
    the weights of a checkpoint may change such a field."""

    first_run: bool = False
    """True if a user needs the flag for a first run. Plain --help lists only these flags."""

    skips_steps: bool = False
    """True if the flag turns on a check that can cause a training step to be skipped."""

    chooses_trained: bool = False
    """True if the flag affects which parameters are frozen."""

    same_setting_as: str | None = None
    """Name of another field that expresses the same setting. If a later source of flags sets one of the two fields, the
    new value replaces the values of both fields."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    """Exclusive upper bound of the value. If the flag accepts several numbers, the bound applies to each of them."""

    bounds_reason: str = ""
    """Reason for the bounds, quoted in messages."""

    no_effect_without: Conditions = ()
    """Conditions under which the flag has an effect. If none of these conditions is met, the run reports that the flag
    has no effect, and continues."""

    off_without: Conditions = ()
    """Conditions under which the flag has an effect. If none of these conditions is met, the run reports that the flag
    has no effect, and turns the flag off before other rules check it."""

    needs: Conditions = ()
    """Conditions that permit the flag. The flag is an error if none of these conditions is met."""

    excludes: Conditions = ()
    """Conditions that conflict with the flag. The flag is an error if at least one of these conditions is met."""

    def broken_bound(self, value: float) -> str | None:
        """Return the rule that `value` violates; None if `value` is within the bounds of the flag."""
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
    """Return a dataclass field that carries a `FlagSpec` with the given aliases and with the fields `spec`.

    Some `FlagSpec` fields, such as `needs`, hold a tuple of `Condition`s. In `spec`, such a field may also be a single
    condition, and each condition may be a string such as "--fp16"."""
    for name in ("no_effect_without", "off_without", "needs", "excludes"):
        if name in spec:
            spec[name] = conditions(spec[name])
    return field(default=default, metadata={"flag": FlagSpec(aliases=aliases, **spec)})


def conditions(given: str | Condition | tuple[str | Condition, ...]) -> Conditions:
    """Convert one or more conditions, each given as text or as a `Condition`, to a tuple of `Condition`s."""
    several = given if isinstance(given, tuple) else (given,)
    return tuple(Condition(each) if isinstance(each, str) else each for each in several)


T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """Base class for the sections of the configuration. A section also carries the values of flags that extensions
    define."""

    extension_options: tuple[Any, ...] = field(default=(), kw_only=True, metadata={"flag": None})
    """Values of extensions' flags: instances of the dataclasses that define the flags."""

    def options(self, cls: type[T]) -> T:
        """Return the values of the extension flags that the dataclass `cls` defines, or the defaults of `cls` if no
        flag is set."""
        return next((options for options in self.extension_options if isinstance(options, cls)), None) or cls()

    def without(self, field: str) -> Self:
        """Return a copy of this section in which all flags of the extension that defines `field` are set to their
        defaults."""
        others = (options for options in self.extension_options if not hasattr(options, field))
        return replace(self, extension_options=tuple(others))

    def with_options(self, *options: Any) -> Self:
        """Return a copy of this section with different values of extension flags. `options` are instances of the
        dataclasses that define the flags; each replaces the section's instance of the same class."""
        classes = tuple(type(each) for each in options)
        others = (each for each in self.extension_options if not isinstance(each, classes))
        return replace(self, extension_options=(*others, *options))
