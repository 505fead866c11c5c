"""Checks of the names in a user's family file: parameters and config.json keys. This module does not import torch.

A name that no built-in family uses may be new, such as a key that exists only in the user's config.json. A new name is
an error in tables that must refer to existing names. A new name that closely resembles an existing key is also an
error, because it is probably a typo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

OF_CONFIG = ("keys", "values", "defaults", "only", "equal")
"""Tables of a family file whose keys are config.json keys."""

SINGLE = ("multi_token_key", "earlier_tokens", "windows_below", "width_without_experts")
"""Keys of a family file whose values are config.json keys."""

ALIKE = 0.85
"""Minimum similarity to an existing key at which a new key is considered misspelled."""


def near(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a message suffix that suggests the most similar known name. The suffix is empty if the similarity of all
    known names is below `cutoff`."""
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; nearest: {close[0]}" if close else ""


def config_keys(table: Mapping[str, Any]) -> set[str]:
    """Return all config.json keys that occur in the tables of a family file."""
    found = {key for kind in OF_CONFIG for key in table.get(kind, {})}
    found |= {*table.get("spelling", {}), *table.get("spelling", {}).values(), *table.get("class_names", {})}
    found |= {*table.get("aliases", {}), *table.get("aliases", {}).values(), *table.get("class_defaults", {})}
    found |= {table[key] for key in SINGLE if table.get(key)}
    return found | {key for powers in table.get("powers", {}).values() for key in powers}


def parameters(weights: Iterable[str]) -> set[str]:
    """Return the parameter names in weights tables with all possible endings. A name that ends in `weight`, `bias` or
    `*` is returned with each of these three endings; `*` means both weight and bias."""
    found = set[str]()
    for name in weights:
        stem, _, last = name.rpartition(".")
        found |= {f"{stem}.{kind}" for kind in ("weight", "bias", "*")} if last in ("*", "weight", "bias") else {name}
    return found


def misspelled(
    own: Mapping[str, Any], base: Mapping[str, Any], known_keys: set[str], known_parameters: set[str]
) -> Iterator[str]:
    """Yield a message for each unknown or probably misspelled name in the tables of a family file.

    Args:
        own: Content of the file.
        base: Complete table of the base that the file selects with `like`; empty if the file selects no base.
        known_keys: Keys of config.json that any built-in family uses.
        known_parameters: Parameter names that the weights table of any built-in family uses.
    """
    tables = [("weights", each) for each in own.get("weights", ()) if isinstance(each, dict)]
    for at, table in (*tables, ("multi_token_weights", own.get("multi_token_weights", {}))):
        for name in table:
            if name not in known_parameters:
                yield f"{at}: {name!r} is not a parameter of a model{near(name, known_parameters)}"
    keys = {key: ours for key, ours in {**base.get("keys", {}), **own.get("keys", {})}.items() if ours is not None}
    for key, ours in own.get("keys", {}).items():
        if others := [other for other, each in keys.items() if ours is not None and each == ours and other != key]:
            rule = f"{key!r} sets {ours}, which {others[0]!r} of the base also sets"
            yield f"keys: {rule}; correct the key, set the other key to null, or rename it in spelling"
    known = config_keys(base) | {*keys}
    stated = known | {*own.get("defaults", {}), *own.get("only", {})}
    for kind, within in (("values", keys), ("spelling", stated | known_keys)):
        for key in own.get(kind, {}):
            if key not in within:
                yield f"{kind}: {key!r} is not a key of the family{near(key, within)}"
    referred = [("equal", other) for other in own.get("equal", {}).values()]
    referred += [("powers", key) for powers in own.get("powers", {}).values() for key in powers]
    for kind, key in referred:
        if key not in stated:
            yield f"{kind}: {key!r} is not a key of the family{near(key, stated)}"
    named = [(kind, key) for kind in ("keys", "defaults", "only", "equal") for key in own.get(kind, {})]
    for kind, key in (*named, *((each, own[each]) for each in SINGLE if own.get(each))):
        of_family = known - {*own.get("keys", {})}
        if key not in known_keys | of_family and (remedy := near(key, of_family, ALIKE)):
            yield f"{kind}: {key!r} is not a key of the family{remedy}"
