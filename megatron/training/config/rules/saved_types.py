"""Types of the values in a checkpoint's saved configuration, checked before it is read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from megatron.training.config.flags import Flag, field_table, sections

_JSON_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
_RULES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def type_problem(config: Any) -> str | None:
    """The first value of another type than its field has, in the form `config.model.num_layers is text, and must be a
    whole number`; None without one. Unknown fields are not read, and may hold anything."""
    if not isinstance(config, dict):
        return f"config is {_json_name(config)}, and must be an object"
    for section, values in config.items():
        if not isinstance(values, dict):
            return f"config.{section} is {_json_name(values)}, and must be an object"
        if broken := field_problem(values):
            return f"config.{section}.{broken}"
    return None


def field_problem(values: Mapping[str, Any]) -> str | None:
    """The same of fields by their names alone."""
    table = field_table()
    for field, value in values.items():
        flag = table.get(field)
        if flag is None or _fits(flag, value):
            continue
        rule = _RULES[flag.kind]
        if not flag.takes_several:
            return f"{field} is {_json_name(value)}, and must be {rule}"
        if not isinstance(value, list | tuple):
            return f"{field} is {_json_name(value)}, and must be a list, each of its values {rule}"
        wrong = next(each for each in value if not _is_one(flag, each))
        return f"{field} holds {_json_name(wrong)}, and each of its values must be {rule}"
    return None


def _fits(flag: Flag, value: Any) -> bool:
    if value is None:
        return flag.default is None or type(None) in get_args(get_type_hints(sections()[flag.section])[flag.field])
    if flag.takes_several and isinstance(value, list | tuple):
        return all(_is_one(flag, each) for each in value)
    return _is_one(flag, value)


def _is_one(flag: Flag, value: Any) -> bool:
    """Whether a value is one of a flag's. A whole number may be written as a float."""
    if flag.kind is bool or isinstance(value, bool):
        return flag.kind is bool and isinstance(value, bool)
    if flag.kind is int:
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, (int, float) if flag.kind is float else flag.kind)


def _json_name(value: Any) -> str:
    return _JSON_NAMES.get(type(value), "null")
