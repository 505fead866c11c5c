"""`tools/translate_flags.py --list` says what becomes of each flag of Megatron-LM that this program does not have."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.translate_flags import TABLES, main

ROOT = Path(__file__).parents[3]


def flags_in(table: object) -> set[str]:
    """Every flag or beginning of flags in a part of the tables, whether key or value."""
    if isinstance(table, dict):
        return {key.split()[0] for key in table if key.startswith("--")}.union(*map(flags_in, table.values()))
    if isinstance(table, list):
        return {each.split()[0] for each in table if isinstance(each, str) and each.startswith("--")}.union(
            *(flags_in(each) for each in table if isinstance(each, dict))
        )
    return set()


def test_the_list_has_every_flag_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    words = {word.rstrip(":;,").removesuffix("...") for word in capsys.readouterr().out.split()}
    flags = flags_in(tomllib.loads(TABLES.read_text(encoding="utf-8")))
    assert len(flags) > 500
    assert sorted(flags - words) == []


def test_the_list_says_what_a_flag_becomes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  --batch-size -> --micro-batch-size {}" in lines
    assert "  --optimizer lion: examples/lion.py" in lines
    assert any(line.startswith("  --use-mup --mup-...: ") or line.startswith("  --use-mup: ") for line in lines)
