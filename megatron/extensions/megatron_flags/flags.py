"""Flags of Megatron-LM and Megatron-DeepSpeed: lists of data, and what those without a field are read as. No torch.

The tables are in megatron_flags.toml, beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.flag_spec import flag
from megatron.training.config.foreign_flags import (
    DIFFERENCES,
    FLAG_TABLES,
    Accepted,
    Entry,
    Exchange,
    ForeignFlags,
    NotBuilt,
    SameAs,
)
from megatron.training.extensions import extension_flags


def read_tables() -> ForeignFlags:
    """Reads the tables."""
    import tomllib

    tables = tomllib.loads(Path(__file__).with_name("megatron_flags.toml").read_text(encoding="utf-8"))
    entries: dict[str, Entry] = {}
    for group in tables["no_effect"]:
        settings = {name: value for name, value in group.items() if name != "flags"}
        settings["values"] = tuple(settings.get("values", ()))
        if settings.get("arity") == "any":
            settings["arity"] = None
        entries |= dict.fromkeys(group["flags"], Accepted(**settings))
    for quiet, table in ((True, tables["usual"]), (False, tables["replaced"])):
        entries |= {name: SameAs(flags, quiet) for name, flags in table.items()}
    entries |= {name: Exchange(*words) for name, words in tables["exchanged"].items()}
    prefixes: dict[str, NotBuilt] = {}
    for group in tables["not_built"]:
        settings = {name: group[name] for name in ("feature", "remedy") if name in group}
        entry = NotBuilt(**settings, switch=tuple(group.get("switch", ())))
        entries |= dict.fromkeys(group.get("flags", ()), entry)
        prefixes |= dict.fromkeys(group.get("prefixes", ()), entry)
    values = (tables[name] for name in ("same_values", "values_not_built", "several_not_built", "examples"))
    return ForeignFlags(entries, prefixes, *values)


@extension_flags("lists of data", may_change=True, reads=f"{__package__}.data_lists:with_data_lists", part_of="data")
@dataclass(frozen=True)
class DataLists:
    """Data in other words than those of --data-path and its kin."""

    data_args_path: str | None = flag(None, path="local")
    """File with the words of --data-path."""

    per_split_data_args_path: str | None = flag(None, path="local")
    """JSON file with lists "train", "valid" and "test" of the words of --train-data-path and its kin."""

    train_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Training data as "NAME: WEIGHT START:END PREFIX, ...", where START:END is a share of the documents."""

    train_weighted_split_paths_path: str | None = flag(None, path="local")
    """File with the value of --train-weighted-split-paths."""

    valid_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --train-weighted-split-paths, for validation."""

    valid_weighted_split_paths_path: str | None = flag(None, path="local")
    """File with the value of --valid-weighted-split-paths."""

    test_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --train-weighted-split-paths, for the test."""

    test_weighted_split_paths_path: str | None = flag(None, path="local")
    """File with the value of --test-weighted-split-paths."""

    @property
    def given(self) -> dict[str, tuple[str, ...] | str]:
        """Field -> value of those that are given."""
        return {field: value for field, value in vars(self).items() if value}


FLAG_TABLES.register("Megatron-LM", read_tables)
DIFFERENCES.register("Megatron-LM", f"{__package__}.megatron_differences:differences_met")
