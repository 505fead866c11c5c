"""The short form of `python -m tests.faults.stage_changes`."""

from __future__ import annotations

from pathlib import Path

from tests.faults.stage_changes import campaign


def test_runs_killed_around_a_change_of_stage_take_each_sample_once(tmp_path: Path) -> None:
    outcomes = campaign(kills=2, seed=7, folder=tmp_path)
    assert len(outcomes) == 2 and not any(outcome.wrong for outcome in outcomes), outcomes
