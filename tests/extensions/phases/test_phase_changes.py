"""The short form of `python -m tests.extensions.phases.phase_changes`."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.extensions.phases.phase_changes import LAYOUTS, killed_and_resumed


def test_runs_killed_around_a_change_of_phase_take_each_sample_once(tmp_path: Path) -> None:
    small = [layout for layout in LAYOUTS if layout[0] <= 2]
    outcomes = list(killed_and_resumed(Random(7), tmp_path, kills=2, layouts=small))
    assert len(outcomes) == 2 and not any(outcome.wrong for outcome in outcomes), outcomes
