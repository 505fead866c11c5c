"""Types of the values in a checkpoint's metadata. The reader of a checkpoint checks these types, because the metadata
file may come from an untrusted source.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from megatron.training.config.flags import Flag, field_table, sections

_JSON_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
LARGEST = 2**53
"""Largest integer that a checkpoint's metadata may contain, which is also the limit for flags."""


class Finite(float):
    """Type of a number that is neither NaN nor infinite."""


class SavedPhase(TypedDict):
    """Types of the values that a checkpoint stores for each training phase that has started (`RunPlan.record`)."""

    name: str
    first_sample: int
    planned: list[int]
    values: dict[str, object] | None


class SavedOptimizer(TypedDict):
    """Types of the optimizer's step count and loss-scale state in a checkpoint."""

    step_count: int
    loss_scaler: dict[str, Finite]


class SavedSeed(TypedDict, total=False):
    """Type of the saved seed, which determines initial values, dropout and data order."""

    seed: int


class SavedMetadata(TypedDict, total=False):
    """Types of a checkpoint's metadata. The entries `config` and `model_of_run` contain configuration fields, which are
    checked separately."""

    format_version: int
    torch_version: str
    iteration: int
    consumed_samples: int
    scheduled_samples: int
    skipped_iterations: int
    nan_iterations: int
    skipped_spikes: int
    running_means: list[float]
    past_batches: list[tuple[int, int]] | None
    data_fingerprint: str | None
    loaded_from: str | None
    origin: dict[str, object]
    metrics: dict[str, float | None]
    layout: dict[str, object]
    optimizer: SavedOptimizer
    rng: SavedSeed
    callbacks: dict[str, object]
    stages: list[SavedPhase] | None
    converted: bool


def metadata_problem(values: Mapping[str, object]) -> str | None:
    """Return a description of the first value in a checkpoint's metadata that has the wrong type, or None if all types
    are correct.

    Example: `past_batches[1] must be a list of 2 values, but is text`. Entries that this program does not use may have
    any type, because they are never read.
    """
    of_run = type_problem({"model_of_run": values.get("model_of_run", {})})
    broken = type_problem(values.get("config", {})) or (of_run and of_run.replace("config.", "", 1))
    return broken or next(_faults(values, SavedMetadata, ""), None)


def _faults(value: object, hint: object, where: str) -> Iterator[str]:
    """Yield a description of each element of `value`, at any depth, that does not match the type hint. The type hint
    `object` matches any value."""
    choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if object in choices or (value is None and type(None) in choices):
        return
    kind, parts = get_origin(choices[0]) or choices[0], get_args(choices[0])
    assert isinstance(kind, type)
    needed: frozenset[str] = frozenset()
    if is_typeddict(kind):
        needed, hints = vars(kind)["__required_keys__"], get_type_hints(kind)
        kind = dict
    else:
        hints = dict.fromkeys(value, parts[1]) if kind is dict and isinstance(value, dict) else {}
    if rule := _broken_rule(value, kind, len(parts)):
        yield f"{where} must be {rule}, but is {_shown(value)}"
    elif isinstance(value, dict):
        yield from (f"{where}.{name} is missing" for name in sorted(needed - value.keys()))
        for name, of_name in hints.items():
            if name in value:
                yield from _faults(value[name], of_name, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _faults(each, parts[index if kind is tuple else 0], f"{where}[{index}]")


def _broken_rule(value: object, kind: type, count: int) -> str | None:
    """Return None if the value has the type `kind`. Otherwise, return the expected type in words, such as "a number".
    If the value is a list, its elements are not checked."""
    if kind is tuple:
        return None if isinstance(value, list) and len(value) == count else f"a list of {count} values"
    if kind is int:
        fits = type(value) is int and 0 <= value <= LARGEST
        return None if fits else "a whole number from 0 to 2^53"
    if kind is float:
        return None if type(value) in (int, float) else "a number"
    if kind is Finite:
        return None if type(value) in (int, float) and not _is_endless(value) else "a finite number"
    return None if type(value) is kind else _JSON_NAMES[kind]


_RULES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def type_problem(config: object) -> str | None:
    """Return a description of the first value in a configuration that does not have the type of its field, or None if
    all types are correct.

    Example: `config.model.num_layers must be a whole number, but is text`. Fields that this program does not have may
    contain any value, because they are never read.
    """
    if not isinstance(config, dict):
        return f"config must be an object, but is {_json_name(config)}"
    for section, values in config.items():
        if not isinstance(values, dict):
            return f"config.{section} must be an object, but is {_json_name(values)}"
        if broken := field_problem(values):
            return f"config.{section}.{broken}"
    return None


def field_problem(values: Mapping[str, object]) -> str | None:
    """Check the types of field values, which are keyed by field name. Return a description of the first wrong value,
    in the format of `type_problem`."""
    table = field_table()
    for field, value in values.items():
        flag = table.get(field)
        if flag is None or _fits(flag, value):
            continue
        rule = _RULES[flag.kind]
        if not flag.takes_several:
            return f"{field} must be {rule}, but is {_json_name(value)}"
        if not isinstance(value, list | tuple):
            return f"{field} must be a list of values that are {rule}, but is {_json_name(value)}"
        wrong = next(each for each in value if not _is_one(flag, each))
        return f"{field} must contain only values that are {rule}, but contains {_json_name(wrong)}"
    return None


def _fits(flag: Flag, value: object) -> bool:
    if value is None:
        return flag.default is None or type(None) in get_args(get_type_hints(sections()[flag.section])[flag.field])
    if flag.takes_several and isinstance(value, list | tuple):
        return all(_is_one(flag, each) for each in value)
    return _is_one(flag, value)


def _is_one(flag: Flag, value: object) -> bool:
    """Return True if `value` has the type of the flag's value, or of a single element if the flag accepts several
    values. An integer may be written as a float."""
    if flag.kind is bool or isinstance(value, bool):
        return flag.kind is bool and isinstance(value, bool)
    if flag.kind is int:
        whole = not isinstance(value, float) or value.is_integer()
        return whole and isinstance(value, int | float) and abs(value) <= LARGEST
    return isinstance(value, (int, float) if flag.kind is float else flag.kind) and not _is_endless(value)


def _is_endless(value: object) -> bool:
    """Return True if a value is NaN, infinite, or an integer beyond the range of doubles, which no flag accepts."""
    try:
        return isinstance(value, int | float) and not math.isfinite(value)
    except OverflowError:
        return True


def _json_name(value: object) -> str:
    return _JSON_NAMES.get(type(value), "null")


def _shown(value: object) -> str:
    """Format a value for a message. A number is shown in digits. Any other value is shown by the name of its type."""
    return f"{value!r:.40}" if type(value) in (int, float) else _json_name(value)
