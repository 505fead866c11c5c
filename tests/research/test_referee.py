"""research/referee.py: Trainer's step is right, and a fault of an older one is found."""

from __future__ import annotations

import pytest

from research import referee


@pytest.mark.parametrize("fault", [None, "means"])
def test_a_step_of_trainer_is_judged(fault: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert referee.main(["trainer", *(["--fault", fault] if fault else [])]) == (1 if fault else 0)
    count = 0 if fault else 15
    assert f"{count} of 15 gradients are equal" in capsys.readouterr().out


def test_a_fault_is_of_the_program() -> None:
    with pytest.raises(SystemExit):
        referee.main(["trainer", "--fault", "norms"])
