"""Flags of Megatron-LM and Megatron-DeepSpeed without a configuration field: what each one is read as. No torch.

The tables are in megatron_flags.toml, beside this file.
"""

from __future__ import annotations

from pathlib import Path

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
        entries |= {flag: SameAs(flags, quiet) for flag, flags in table.items()}
    entries |= {flag: Exchange(*words) for flag, words in tables["exchanged"].items()}
    prefixes: dict[str, NotBuilt] = {}
    for group in tables["not_built"]:
        settings = {name: group[name] for name in ("feature", "remedy") if name in group}
        entry = NotBuilt(**settings, switch=tuple(group.get("switch", ())))
        entries |= dict.fromkeys(group.get("flags", ()), entry)
        prefixes |= dict.fromkeys(group.get("prefixes", ()), entry)
    values = (tables[name] for name in ("same_values", "values_not_built", "several_not_built", "examples"))
    return ForeignFlags(entries, prefixes, *values)


FLAG_TABLES.register("Megatron-LM", read_tables)
DIFFERENCES.register("Megatron-LM", f"{__package__}.megatron_differences:differences_met")
