"""Tests of `tools/translate_flags.py --list`, which lists the treatment of each Megatron-LM flag that this program
lacks. The tests also cover the known differences between the programs. The tool prints a difference if it affects the
given flags."""

from __future__ import annotations

import io
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from megatron.extensions.interop.megatron_flags.megatron_differences import DIFFERENCES, MET, differences_met
from megatron.training.config.arguments import config_of, read_flags
from megatron.training.config.validation import resolve
from tools.translate_flags import TABLES, main

TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 128 --mock-data"
MEETING = tomllib.loads(Path(__file__).with_name("differences_met.toml").read_text(encoding="utf-8"))
"""Two lists of flags for each difference between the programs, keyed by the subject of the difference. The difference
affects the flags in the first list, but not the flags in the second list."""


def subjects_met(flags: str) -> set[str]:
    reader = read_flags(f"{TINY} {flags}".split())
    assert not reader.problems
    met = set(differences_met(resolve(config_of(reader.values), 1), reader.spelled))
    return {each.subject for each in DIFFERENCES if str(each) in met}


def flags_in(table: object) -> set[str]:
    """Return all flags and flag prefixes that occur as keys or values in a part of the tables."""
    if isinstance(table, dict):
        return {key.split()[0] for key in table if key.startswith("--")}.union(*map(flags_in, table.values()))
    if isinstance(table, list):
        return {each.split()[0] for each in table if isinstance(each, str) and each.startswith("--")}.union(
            *(flags_in(each) for each in table if isinstance(each, dict))
        )
    return set()


@pytest.fixture(scope="module")
def listed() -> list[str]:
    with redirect_stdout(io.StringIO()) as out:
        assert main(["--list"]) == 0
    return out.getvalue().splitlines()


def test_the_list_has_the_treatment_of_each_flag(listed: list[str]) -> None:
    words = {word.rstrip(":;,").removesuffix("...") for line in listed for word in line.split()}
    flags = flags_in(tomllib.loads(TABLES.read_text(encoding="utf-8")))
    assert len(flags) > 500
    assert sorted(flags - words) == []
    assert "  --batch-size -> --micro-batch-size {}" in listed
    assert "  --optimizer lion: examples/lion.py" in listed
    assert any(line.startswith(("  --use-mup --mup-...: ", "  --use-mup: ")) for line in listed)


def test_every_difference_is_listed_and_has_cases(listed: list[str]) -> None:
    assert [each.subject for each in DIFFERENCES if f"  {each}" not in listed] == []
    assert MEETING.keys() == MET.keys() == {each.subject for each in DIFFERENCES}
    assert subjects_met("") == set()


@pytest.mark.usefixtures("forget_extensions_at_once")
@pytest.mark.parametrize("subject", MEETING)
def test_flags_report_their_differences(subject: str) -> None:
    meet, others = MEETING[subject]
    assert [flags for flags in meet if subject not in subjects_met(flags)] == []
    assert [flags for flags in others if subject in subjects_met(flags)] == []


def test_flags_of_a_file_report_differences(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("calculate_per_token_loss: true\ntrain-iters: 5\neod-mask-loss: false\n")
    assert read_flags(["--config", str(file)]).spelled >= {"--calculate-per-token-loss", "--train-iters"}
    assert "--eod-mask-loss" not in read_flags(["--config", str(file)]).spelled


def test_a_translation_reports_differences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *TINY.split(), "--eod-mask-loss", "--global-batch-size", "2"]) == 0
    told = capsys.readouterr().out.partition("Different from Megatron-LM:\n")[2]
    assert told.startswith("  loss: sum over tokens")
