"""Checks names in the tables of a user's family file: parameters, and config.json keys. This module does not import
torch.

A name that no built-in family knows may be the user's own, such as a key that only their config.json has. It is refused
if it must refer to something that exists, or if it closely resembles an existing key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

OF_CONFIG = ("keys", "values", "defaults", "only", "equal")
"""Tables indexed by config.json keys."""

SINGLE = ("multi_token_key", "earlier_tokens", "windows_below", "width_without_experts")
"""File keys whose value is a config.json key."""

ALIKE = 0.85
"""Similarity from which a new key counts as misspelled."""


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a message suffix with the most similar known name, if there is a similar one."""
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; nearest: {close[0]}" if close else ""


def config_keys(table: Mapping[str, Any]) -> set[str]:
    """Return the config.json keys that a family's table names."""
    found = {key for kind in OF_CONFIG for key in table.get(kind, {})}
    found |= {*table.get("spelling", {}), *table.get("spelling", {}).values(), *table.get("class_names", {})}
    found |= {*table.get("aliases", {}), *table.get("aliases", {}).values(), *table.get("class_defaults", {})}
    found |= {table[key] for key in SINGLE if table.get(key)}
    return found | {key for powers in table.get("powers", {}).values() for key in powers}


def parameters(weights: Iterable[str]) -> set[str]:
    """Return the parameter names in weights tables, each with `weight`, `bias`, and `*` for both."""
    found = set[str]()
    for name in weights:
        stem, _, last = name.rpartition(".")
        found |= {f"{stem}.{kind}" for kind in ("weight", "bias", "*")} if last in ("*", "weight", "bias") else {name}
    return found


def misspelled(
    own: Mapping[str, Any], base: Mapping[str, Any], known_keys: set[str], known_parameters: set[str]
) -> Iterator[str]:
    """Yield the problems of names in a file's tables.

    Args:
        own: the file.
        base: the whole table that it is like; empty if there is none.
        known_keys: keys of config.json that any built-in family knows.
        known_parameters: parameters that any built-in family has.
    """
    tables = [("weights", each) for each in own.get("weights", ()) if isinstance(each, dict)]
    for at, table in (*tables, ("multi_token_weights", own.get("multi_token_weights", {}))):
        for name in table:
            if name not in known_parameters:
                yield f"{at}: {name!r} is no parameter of a model{near(name, known_parameters)}"
    keys = {key: ours for key, ours in {**base.get("keys", {}), **own.get("keys", {})}.items() if ours is not None}
    for key, ours in own.get("keys", {}).items():
        if others := [other for other, each in keys.items() if ours is not None and each == ours and other != key]:
            rule = f"{key!r} gives {ours}, as {others[0]!r} of the family that it is like does"
            yield f"keys: {rule}; correct the key, state the other one as null, or rename it in spelling"
    known = config_keys(base) | {*keys}
    stated = known | {*own.get("defaults", {}), *own.get("only", {})}
    for kind, within in (("values", keys), ("spelling", stated | known_keys)):
        for key in own.get(kind, {}):
            if key not in within:
                yield f"{kind}: {key!r} is no key of the family{near(key, within)}"
    referred = [("equal", other) for other in own.get("equal", {}).values()]
    referred += [("powers", key) for powers in own.get("powers", {}).values() for key in powers]
    for kind, key in referred:
        if key not in stated:
            yield f"{kind}: {key!r} is no key of the family{near(key, stated)}"
    named = [(kind, key) for kind in ("keys", "defaults", "only", "equal") for key in own.get(kind, {})]
    for kind, key in (*named, *((each, own[each]) for each in SINGLE if own.get(each))):
        of_family = known - {*own.get("keys", {})}
        if key not in known_keys | of_family and (remedy := near(key, of_family, ALIKE)):
            yield f"{kind}: {key!r} is no key of the family{remedy}"
