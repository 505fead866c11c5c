"""Command-line flags, generated from the fields of `RunConfig`. This module does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron.core.config.flag_spec import Condition, Conditions, FlagSpec, conditions
from megatron.core.config.losses import parse_chunk
from megatron.core.config.model import TransformerConfig
from megatron.core.registry import imported
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.url_credentials import take_credentials


class TooLargeError(ValueError):
    """Raised for an integer that is too large for any flag."""


class StandInError(ValueError):
    """Raised if a flag names a file that contains values of other flags, but this file cannot be read."""

    def __init__(self, text: str, config: RunConfig) -> None:
        super().__init__(text)
        self.config = config
        """Configuration with placeholders for the unreadable values, so that no check reports them as missing."""


def parse_int(text: str) -> int:
    """Parse an integer in any of the forms `1000000`, `1_000_000`, `1e6` and `1000000.0`. Raises ValueError."""
    try:
        value = int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is not a whole number") from None
        value = int(number)
    if abs(value) > 2**53:
        raise TooLargeError("must not be larger than 2^53, about 9e15")
    return value


def parse_float(text: str) -> float:
    value = float(text)
    if math.isnan(value) or "_" in text:  # float() would accept 1_000
        raise ValueError("not a number")
    return value


def parse_window(text: str) -> int:
    """Parse a window: the number of visible tokens, or Megatron-LM's pair `(left, right)`, where right must be 0."""
    parts = text.strip("() ").split(",")
    if len(parts) == 1:
        return parse_int(parts[0])
    left, right = (parse_int(part) for part in parts)
    if left < 0 or right != 0:
        raise ValueError("a window can only reach back: (left, 0) with left >= 0")
    return left + 1


PARSERS: dict[type, Callable[[str], object]] = {int: parse_int, float: parse_float, str: str}
FIELD_PARSERS: dict[str, Callable[[str], object]] = {"window_size": parse_window, "loss_chunk_tokens": parse_chunk}
KIND_NAMES = {int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Flag:
    """Command-line flag that sets one configuration field."""

    section: str
    field: str
    kind: type
    """Type of the flag's value, or of each element of a tuple: bool, int, float or str."""

    default: object
    spec: FlagSpec

    section_needs: Conditions = ()
    """Conditions under which the section of this flag has an effect (`NO_EFFECT_WITHOUT` in the section's class)."""

    @property
    def name(self) -> str:
        """Spelling used in help texts and messages."""
        return self.spec.name or dashed(self.field)

    @property
    def metavar(self) -> str:
        """Placeholder that help texts show for the flag's value."""
        names = {"local": "PATH", "stored": "PATH", "url": "PATH_OR_URL", None: self.kind.__name__.upper()}
        return names[self.spec.path]

    @property
    def takes_several(self) -> bool:
        """True if the flag accepts several values, which the field holds as a tuple."""
        return self.spec.many or self.spec.repeats

    @property
    def shown(self) -> tuple[str, ...]:
        """Spellings of the flag that help texts list."""
        both = self.kind is bool and self.default and not self.spec.name
        return (self.name, *self.spec.aliases, *((dashed(f"no_{self.field}"),) if both else ()))

    def spellings(self) -> Iterator[tuple[str, bool]]:
        """Yield a pair for each spelling of the flag: the spelling, and False if this spelling turns a bool off. Every
        bool also has the spellings of its field name, with and without `no`."""
        on = not (self.kind is bool and self.default and self.spec.name)
        yield self.name, on
        for alias in self.spec.aliases:
            yield alias, on
        if self.kind is bool:
            for spelling, value in ((dashed(self.field), True), (dashed(f"no_{self.field}"), False)):
                if spelling != self.name:
                    yield spelling, value

    def convert(self, texts: Sequence[str]) -> object:
        """Convert the flag's arguments to the field's value. Raises ValueError if an argument is not valid."""
        parse = FIELD_PARSERS.get(self.field, take_credentials if self.spec.path == "url" else PARSERS[self.kind])
        values = []
        for text in texts:
            try:
                values.append(parse(text))
            except TooLargeError:
                raise
            except (ValueError, OverflowError) as error:
                special = self.field in FIELD_PARSERS
                raise ValueError(str(error) if special else f"must be {KIND_NAMES[self.kind]}") from None
        return tuple(values) if self.takes_several else values[0]


def dashed(field: str) -> str:
    return "--" + field.replace("_", "-")


Rules = Callable[[RunConfig, int], Iterable[Problem]]
"""Function of (resolved configuration, world size) that returns the problems it finds, and raises no exceptions."""

Resolve = Callable[[RunConfig], RunConfig]
"""Function that fills in the derived values of a configuration. The function must not raise exceptions."""


@dataclass(frozen=True)
class ExtensionSection:
    """Flags that an extension defines."""

    cls: type
    """Frozen dataclass in which each field is a flag."""

    may_change: bool = False
    """True if a run may load a checkpoint that was saved with different values of these flags."""

    rules: Rules | str | None = None
    """Rules for the flags, or the location "module:function" of the rules. A module is imported only if its rules
    apply."""

    always: bool = False
    """True if the rules apply even if none of these flags is given, because other flags can select the component."""

    resolve: Resolve | str | None = None
    """Function that fills in values of other flags. The value is either the function itself or its location
    "module:function"."""

    reads: Resolve | str | None = None
    """Function that reads values of other flags from the files named by these flags. The value may also be its location
    "module:function". It raises ValueError with the flag's name if a file cannot be read."""

    part_of: str | None = None
    """Section of `RunConfig` to which the flags belong.

    An extension's flags with `part_of="model"` describe the model. A run can read model flags from a checkpoint, and
    compares their values with those in the checkpoint. Model flags are converted together with the checkpoint. Flags
    with `part_of="data"` select data."""

    def problems(self, given: RunConfig, config: RunConfig, world_size: int) -> Iterable[Problem]:
        """Return the problems that the rules find in a resolved configuration, or none if the flags are unused."""
        unused = given.options(self.cls) == config.options(self.cls) == self.cls()
        if self.rules is None or (unused and not self.always):
            return ()
        found: Iterable[Problem] = imported(self.rules)(config, world_size)
        return found

    def resolved(self, config: RunConfig) -> RunConfig:
        """Return the configuration, with derived values filled in if any flag of this section is given."""
        return self._filled(config, self.resolve)

    def with_files(self, config: RunConfig) -> RunConfig:
        """Read the files that these flags name, and return the configuration with the values in these files.

        Raises ValueError if a file cannot be opened or read."""
        try:
            return self._filled(config, self.reads)
        except OSError as error:
            path, missing = str(error.filename), isinstance(error, FileNotFoundError)
            for name, value in vars(config.options(self.cls)).items():
                if path in (value if isinstance(value, tuple) else (value,)):
                    rule = "there is no such file" if missing else f"cannot be read ({error.strerror})"
                    raise ValueError(f"{field_table()[name].name} {path}: {rule}; correct the path") from None
            raise

    def _filled(self, config: RunConfig, fill: Resolve | str | None) -> RunConfig:
        if fill is None or config.options(self.cls) == self.cls():
            return config
        filled: RunConfig = imported(fill)(config)
        return filled


EXTENSION_SECTIONS: dict[str, ExtensionSection] = {}
"""Sections of extensions' flags, keyed by their title in `--help`."""


def add_section(title: str, section: ExtensionSection) -> None:
    """Create flags from the fields of an extension's frozen dataclass, in a separate section of `--help`.

    Raises ValueError if the dataclass or a flag in it is not valid."""
    cls = section.cls
    if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ValueError(f"the flags {title!r}: {cls.__name__} must be a frozen dataclass")
    if hasattr(cls, "validate"):
        raise ValueError(f"the flags {title!r}: {cls.__name__}.validate is never called; register it as rules=")
    if title in sections() or any(each.cls is cls for each in EXTENSION_SECTIONS.values()):
        raise ValueError(f"the flags {title!r} are registered twice; register each class once, under its own title")
    taken = spelling_table()
    for flag in _flags_of(title, cls):
        if flag.default is MISSING or flag.kind not in (bool, *PARSERS):
            raise ValueError(
                f"the flags {title!r}: {cls.__name__}.{flag.field} must have a default and be a bool, int, float or "
                "str, one of these or None, or a tuple of these"
            )
        if clash := [spelling for spelling, _ in flag.spellings() if spelling in taken]:
            raise ValueError(f"the flags {title!r}: {clash[0]} is a flag already; rename {cls.__name__}.{flag.field}")
    EXTENSION_SECTIONS[title] = section
    for table in (all_flags, sections, spelling_table, field_table):
        table.cache_clear()


@lru_cache(maxsize=1)
def all_flags() -> tuple[Flag, ...]:
    """Return the flags of all fields of all sections, in order."""
    return tuple(flag for section, cls in sections().items() for flag in _flags_of(section, cls))


@cache
def _flags_of(section: str, cls: type) -> tuple[Flag, ...]:
    hints, found = get_type_hints(cls), []
    for field in _fields_in_order(cls):
        spec = field.metadata.get("flag", FlagSpec())
        if spec is not None:
            if "tuple" in str(hints[field.name]) and not spec.repeats:
                spec = replace(spec, many=True)
            owner = next(base for base in cls.__mro__ if field.name in vars(base).get("__annotations__", ()))
            needs = conditions(vars(owner).get("NO_EFFECT_WITHOUT", ()))
            found.append(Flag(section, field.name, _kind(hints[field.name]), field.default, spec, needs))
    return tuple(found)


def value_of(config: RunConfig, flag: Flag) -> Any:
    """Return the value of a flag's field in a configuration."""
    extension = EXTENSION_SECTIONS.get(flag.section)
    return getattr(config.options(extension.cls) if extension else getattr(config, flag.section), flag.field)


def shown_value(value: object) -> object:
    """Return the value to show after a flag in a message. Return None for a switch, which is shown without a value."""
    return None if isinstance(value, bool) else value


def holds(config: RunConfig, condition: Condition) -> bool:
    """Return True if a configuration meets a condition. Flags of extensions that are not loaded count as not given."""
    if condition.holds is not None:
        return condition.holds(config)
    return any(_is_given(config, *words.split()) for words in condition.parts[0].split(" or "))


def _is_given(config: RunConfig, spelling: str, *rest: str) -> bool:
    flag, on = spelling_table().get(spelling, (None, True))
    value = None if flag is None else value_of(config, flag)
    if not rest:
        return flag is not None and bool(value) == on
    return value is not None and (value > float(rest[1]) if rest[0] == "above" else str(value) == rest[0])


def flags_of(section: str) -> tuple[Flag, ...]:
    """Return the flags of a section of `RunConfig`, including those that extensions add to the section."""
    extensions = {title for title, extension in EXTENSION_SECTIONS.items() if extension.part_of == section}
    return tuple(flag for flag in all_flags() if flag.section == section or flag.section in extensions)


def changed_flags(before: RunConfig, after: RunConfig) -> frozenset[str]:
    """Return the names of the flags that have the default value in `before` but a different value in `after`."""
    if before == after:
        return frozenset()
    return frozenset(
        flag.name for flag in all_flags() if value_of(before, flag) == flag.default != value_of(after, flag)
    )


def named_value(config: RunConfig, field: str) -> Any:
    """Return the value of the configuration field `field`, or None if the flag's extension is not installed."""
    flag = field_table().get(field)
    return None if flag is None else value_of(config, flag)


def with_named(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Return the configuration after setting the fields in `values`, which maps field names to values. Fields of
    extensions that are not installed are ignored."""
    found: dict[str, dict[str, object]] = {}
    for flag in (field_table()[field] for field in values if field in field_table()):
        found.setdefault(flag.section, {})[flag.field] = values[flag.field]
    options = {title: found.pop(title) for title in EXTENSION_SECTIONS if title in found}
    config = replace(config, **{name: replace(getattr(config, name), **own) for name, own in found.items()})
    for title, own in options.items():
        before: Any = config.options(EXTENSION_SECTIONS[title].cls)
        if (after := replace(before, **own)) != before:
            config = config.with_options(after)
    return config


def run_of(model: TransformerConfig) -> RunConfig:
    """Return a run configuration with this model, including the extension flags that `model` carries."""
    return RunConfig(model=model, extension_options=model.extension_options)


def with_fields(model: TransformerConfig, values: Mapping[str, object]) -> TransformerConfig:
    """Return the model configuration with the values in `values`, which is keyed by field and may contain fields of
    extensions."""
    return with_named(run_of(model), values).model


def flat_values(config: RunConfig) -> dict[str, Any]:
    """Return the values of the fields of all sections, keyed by field name."""
    values = _values_of_sections(config)
    return {flag.field: getattr(values[flag.section], flag.field) for flag in all_flags()}


def values_by_section(config: RunConfig) -> dict[str, dict[str, object]]:
    """Return the values keyed by section and field, as in checkpoints. An extension's section is its title."""
    values: dict[str, dict[str, object]] = {section: {} for section in sections()}
    own = _values_of_sections(config)
    for flag in all_flags():
        values[flag.section][flag.field] = _without_credentials(flag, getattr(own[flag.section], flag.field))
    return values


def _without_credentials(flag: Flag, value: Any) -> Any:
    """Hide the credentials of URLs in a value."""
    if flag.spec.path != "url" or value is None:
        return value
    return tuple(map(take_credentials, value)) if isinstance(value, tuple) else take_credentials(value)


def without_credentials(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration with masked credentials in URLs. This process can still use them."""
    values = {flag.field: value_of(config, flag) for flag in all_flags() if flag.spec.path == "url"}
    return with_named(config, {name: _without_credentials(field_table()[name], each) for name, each in values.items()})


def _values_of_sections(config: RunConfig) -> dict[str, object]:
    """Map each section to the dataclass instance that holds its values. The names of sections are those of
    `sections()`."""
    return {
        section: config.options(cls) if section in EXTENSION_SECTIONS else getattr(config, section)
        for section, cls in sections().items()
    }


def config_of_sections(values: Mapping[str, Mapping[str, object]]) -> RunConfig:
    """Create a configuration from the output of `values_by_section`. A field is found even if it belonged to a
    different section when the values were saved.

    Fields that this program does not have are dropped. Missing fields get their defaults."""
    built = {}
    saved = {field: value for fields in values.values() for field, value in fields.items()}
    for section, cls in sections().items():
        known = {flag.field: flag for flag in all_flags() if flag.section == section and flag.field in saved}
        built[section] = cls(**{field: _as_field(flag, saved[field]) for field, flag in known.items()})
    given = [(section.cls(), built.pop(title)) for title, section in EXTENSION_SECTIONS.items()]
    options = tuple(options for default, options in given if options != default)  # `Section.options` adds the defaults
    return RunConfig(**built, extension_options=options)


def _as_field(flag: Flag, value: object) -> object:
    """Convert a value to its field's type.

    If the field holds a tuple, a single value from an older file becomes a tuple. URL credentials are hidden."""
    if flag.spec.path == "url" and isinstance(value, list | tuple):
        value = [take_credentials(each) if isinstance(each, str) else each for each in value]
    if isinstance(value, list | tuple) or value is None or not flag.takes_several:
        return tuple(value) if isinstance(value, list) else value
    return (value,)


def _fields_in_order(cls: type) -> list[Field]:
    """Return the dataclass fields of a section. Inherited fields come last."""
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, "__annotations__", {})}
    return sorted(fields(cls), key=lambda field: field.name in inherited)


@lru_cache(maxsize=1)
def sections() -> dict[str, type]:
    """Map each section to its dataclass. The name of a section is an attribute of `RunConfig` or an extension's
    title."""
    hints = get_type_hints(RunConfig)
    own = {field.name: hints[field.name] for field in fields(RunConfig) if "flag" not in field.metadata}
    return own | {title: section.cls for title, section in EXTENSION_SECTIONS.items()}


FLAG_HOMES: dict[str, str] = {}
"""Dict from each flag, or `--flag=value`, to the built-in extension that defines it, even if this extension is not
installed. `megatron.extensions.load` fills this dict."""


def home_of(spelling: str) -> str | None:
    """Return the built-in extension that defines a flag, even if it is not installed, or None for any other flag."""
    return FLAG_HOMES.get(spelling)


def _kind(hint: Any) -> Any:
    """Return the type of a single value in a type hint, such as str for `tuple[str, ...] | None`."""
    if get_origin(hint) in (UnionType, Union):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return hint


@lru_cache(maxsize=1)
def spelling_table() -> dict[str, tuple[Flag, bool]]:
    """Map each spelling to a pair: its flag, and False if the spelling turns a bool off."""
    table: dict[str, tuple[Flag, bool]] = {}
    for flag in all_flags():
        for spelling, on in flag.spellings():
            assert spelling not in table, f"{spelling} stands for two fields"
            table[spelling] = (flag, on)
    return table


def is_registered(spelling: str, value: str = "") -> bool:
    """Return True if a flag is known and accepts the value."""
    flag, _ = spelling_table().get(spelling, (None, True))
    return flag is not None and (flag.spec.choices is None or value in flag.spec.choices)


@lru_cache(maxsize=1)
def field_table() -> dict[str, Flag]:
    """Map field names to flags. Field names are unique across sections."""
    return {flag.field: flag for flag in all_flags()}
