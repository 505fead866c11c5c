"""Each known difference from Megatron-LM is told where flags meet it, and stands in the page for those who migrate."""

from __future__ import annotations

import pytest

from megatron.training.config.arguments import config_of, read_flags
from megatron.training.config.megatron_differences import DIFFERENCES, differences_met
from megatron.training.config.validation import resolve
from tests.pure.test_flag_table import ROOT
from tools.translate_flags import main

TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 128 --mock-data"
TWO = "--global-batch-size 2"
MEETING = {
    "loss": (
        [f"--eod-mask-loss {TWO}"],
        ["--eod-mask-loss", TWO, f"--eod-mask-loss {TWO} --calculate-per-token-loss"],
    ),
    "padded vocabulary": (["--vocab-size 129", "--tp 2"], ["--vocab-size 129 --pad-vocab-size-to 129"]),
    "`--rope-scaling-factor`": (
        ["--use-rope-scaling --rope-scaling-factor 32"],
        ["--use-rope-scaling", "--rope-scaling-factor 32"],
    ),
    "`--openai-gelu`": (
        ["--openai-gelu --disable-bias-linear", "--openai-gelu --no-bias-gelu-fusion"],
        ["--openai-gelu", "--disable-bias-linear"],
    ),
    "`--embedding-init-method-std`": (
        ["--embedding-init-method-std 1"],
        ["--embedding-init-method-std 1 --weight-decay-on matrices", "--init-method-std 1"],
    ),
    "`--optimizer lion`": (["--optimizer lion"], ["--optimizer muon --muon-scalar-optimizer lion"]),
    "`--rampup-batch-size`": (["--rampup-batch-size 1 1 4"], []),
    "`--step-batch-size-schedule`, validation": (
        ["--step-batch-size-schedule 0:1"],
        [f"--step-batch-size-schedule 0:1 {more}" for more in ("--eval-iters 0", "--eval-global-batch-size 1")],
    ),
}
"""Subject of a difference -> flags that meet it, and flags that do not."""


def subjects_met(flags: str) -> set[str]:
    reader = read_flags(f"{TINY} {flags}".split())
    assert not reader.problems
    met = set(differences_met(resolve(config_of(reader.values), 1), reader.spelled))
    return {each.subject for each in DIFFERENCES if str(each) in met}


def test_every_difference_is_in_the_page_and_has_cases() -> None:
    page = (ROOT / "docs" / "migrating_from_megatron.md").read_text(encoding="utf-8").splitlines()
    assert [each.row for each in DIFFERENCES if each.row not in page] == []
    assert MEETING.keys() == {each.subject for each in DIFFERENCES}
    assert subjects_met("") == set()


@pytest.mark.usefixtures("forget_extensions_at_once")
@pytest.mark.parametrize("subject", MEETING)
def test_flags_meet_a_difference(subject: str) -> None:
    meet, others = MEETING[subject]
    assert [flags for flags in meet if subject not in subjects_met(flags)] == []
    assert [flags for flags in others if subject in subjects_met(flags)] == []


def test_a_translation_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *TINY.split(), "--eod-mask-loss", "--global-batch-size", "2"]) == 0
    told = capsys.readouterr().out.partition("Different from Megatron-LM:\n")[2]
    assert told.startswith("  loss: sum over tokens")
