"""research/referee.py: The referee accepts the step of the installed Trainer and detects a fault of an older
Trainer."""

from __future__ import annotations

import os
import sys

import pytest

from research import referee


@pytest.mark.parametrize("fault", [None, "means"])
def test_a_step_of_trainer_is_judged(fault: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert referee.main(["trainer", *(["--fault", fault] if fault else [])]) == (1 if fault else 0)
    count = 0 if fault else 15
    assert f"{count} of 15 gradients are equal" in capsys.readouterr().out


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, fails = ([sys.executable, "-c", code] for code in ("import time; time.sleep(60)", "raise SystemExit(3)"))
    with pytest.raises(SystemExit, match="the step failed on rank 1 with exit code 3; its error is above"):
        referee.run_ranks([waits, fails], os.environ)
    referee.run_ranks([[sys.executable, "-c", ""]], os.environ)
    monkeypatch.setattr(referee, "LIMIT", 0)
    with pytest.raises(SystemExit, match="the step has not ended after 0 s"):
        referee.run_ranks([waits, waits], os.environ)


def test_a_fault_must_belong_to_the_program() -> None:
    with pytest.raises(SystemExit):
        referee.main(["trainer", "--fault", "norms"])
