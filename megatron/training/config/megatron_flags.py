"""Megatron-LM flags without a configuration field: accepted without effect, refused, or another spelling.

The tables are in megatron_flags.toml, beside this file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

CONSTANTS: dict[str, tuple[str, Any]] = {
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--no-position-embedding": ("position_embedding_type", "none"),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--enable-cuda-graph": ("cuda_graph_impl", "local"),
}
"""Switches that set one field to one value."""


@dataclass(frozen=True)
class Accepted:
    """A flag without effect: `arity` is its number of values; `reason` is logged.

    If `values` is given, only these values are accepted; any other value asks for a feature that is not built.
    """

    reason: str
    arity: int = 0
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForeignFlags:
    """What megatron_flags.toml says, by flag."""

    no_effect: dict[str, Accepted]
    renamed: dict[str, str]
    """Flag -> the flag to use instead."""

    not_built: dict[str, str]
    """Flag -> the feature that it asks for."""

    not_built_prefixes: dict[str, str]
    """Prefix of flags that are not fields -> the feature that they ask for."""


@cache
def foreign_flags() -> ForeignFlags:
    """Reads the tables. Called only for a flag that no field has, so that most runs never read them."""
    tables = tomllib.loads(files(__package__).joinpath("megatron_flags.toml").read_text(encoding="utf-8"))
    return ForeignFlags(
        {
            flag: Accepted(group["reason"], group.get("arity", 0), tuple(group.get("values", ())))
            for group in tables["no_effect"]
            for flag in group["flags"]
        },
        tables["renamed"],
        {flag: feature for feature, flags in tables["not_built"].items() for flag in flags},
        {prefix: feature for feature, prefixes in tables["not_built_prefixes"].items() for prefix in prefixes},
    )
