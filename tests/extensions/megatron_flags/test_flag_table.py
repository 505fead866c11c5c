"""docs/megatron_flags.md says what becomes of each flag.

`python -m tests.extensions.megatron_flags.test_flag_table` writes it anew."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "megatron_flags.md"
TABLES = ROOT / "megatron" / "extensions" / "megatron_flags" / "megatron_flags.toml"

HEAD = """# Flags of Megatron-LM and Megatron-DeepSpeed

What becomes of each flag that is not one of this program's own. `python pretrain_gpt.py --help all` lists its own,
under Megatron-LM's names. Underscores stand for dashes, and `--disable-X` for `--no-X`. The lists are made from
`megatron/extensions/megatron_flags/megatron_flags.toml`, which the command line reads, and
`python tools/translate_flags.py SCRIPT` applies them to a launch script.
[migrating_from_megatron.md](migrating_from_megatron.md) lists what differs behind equal names.
"""


def page() -> str:
    return "\n".join([HEAD, *sections(tomllib.loads(TABLES.read_text(encoding="utf-8")))]) + "\n"


def sections(tables: dict) -> Iterator[str]:
    yield "## Read as other flags\n\n`{}` stands for the flag's values.\n\n| flag | read as |\n| --- | --- |"
    yield from (f"| `{flag}` | `{ours}` |" for flag, ours in sorted((tables["usual"] | tables["replaced"]).items()))
    for flag, (option, before, after) in tables["exchanged"].items():
        replaced = "any value" if before == "any" else f"`{before}`"
        yield f"| `{flag}` | `{option} {after}` in place of {replaced} |"
    yield "\n## Values of examples\n\nA file of `examples/` registers each, and is loaded for it as by `--extension`.\n"
    yield "| value | file |\n| --- | --- |"
    yield from (f"| `{value}` | [{file}](../examples/{file}) |" for value, file in sorted(tables["examples"].items()))
    yield "\n## Values read as others\n\n| flag | value | read as |\n| --- | --- | --- |"
    for flag, values in sorted(tables["same_values"].items()):
        yield from (f"| `{flag}` | `{value}` | {ours} |" for value, ours in values.items())
    yield "\n## Without effect\n\nAccepted, and reported in a line with the reason.\n"
    yield "| reason | flags |\n| --- | --- |"
    reasons: dict[str, list[str]] = {}
    for group in tables["no_effect"]:
        only = f" ({' or '.join(group['values'])} only)" if group.get("values") else ""
        reasons.setdefault(group["reason"], []).extend(f"`{flag}`{only}" for flag in group["flags"])
    yield from (f"| {reason} | {' '.join(flags)} |" for reason, flags in sorted(reasons.items()))
    yield "\n## Not built\n\nRefused with the feature's name. Without the feature its settings have no effect.\n"
    yield "| feature | flags | settings | instead |\n| --- | --- | --- | --- |"
    features: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for group in tables["not_built"]:
        asked, settings, remedies = features.setdefault(group["feature"], ([], [], []))
        flags = [f"`{flag}`" for flag in group.get("flags", ())] + [
            f"`{each}...`" for each in group.get("prefixes", ())
        ]
        (settings if group.get("switch") else asked).extend(flags)
        remedies.extend([group["remedy"].removeprefix("remove it: ")] if "remedy" in group else [])
    for flag, values in tables["values_not_built"].items():
        for value, feature in values.items():
            features.setdefault(feature, ([], [], []))[0].append(f"`{flag} {value}`")
    for flag, feature in tables["several_not_built"].items():
        features.setdefault(feature, ([], [], ["give one value"]))[0].append(f"`{flag}` with several values")
    for feature, (asked, settings, remedies) in sorted(features.items()):
        yield f"| {feature} | {' '.join(asked)} | {' '.join(settings)} | {'; '.join(dict.fromkeys(remedies))} |"


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.extensions.megatron_flags.test_flag_table"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
