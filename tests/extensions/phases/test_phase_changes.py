"""Runs across a change of phase; the short form of `python -m tests.extensions.phases.phase_changes`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tests.extensions.phases.phase_changes import LAYOUTS, MODEL, killed_and_resumed
from tests.forked import run_forked


def test_runs_killed_around_a_change_of_phase_take_each_sample_once(tmp_path: Path) -> None:
    small = [layout for layout in LAYOUTS if layout[0] <= 2]
    outcomes = list(killed_and_resumed(Random(7), tmp_path, kills=2, layouts=small))
    assert len(outcomes) == 2 and not any(outcome.wrong for outcome in outcomes), outcomes


def test_a_validation_takes_the_data_of_its_phase(tmp_path: Path) -> None:
    """As an evaluation of the checkpoint does, which begins in that phase."""
    phases = tmp_path / "phases.yaml"
    phases.write_text("- {name: short, seq-length: 8}\n- {name: long, from-iterations: 2, seq-length: 16}\n")
    flags = [*MODEL, "--mock-data", "--data-phases", str(phases), "--train-iters", "4", "--eval-iters", "2"]
    flags += ["--eval-interval", "4", "--split", "8,1,1", "--load", str(tmp_path / "trained"), "--pp", "2"]
    found = []
    for name, more in (("trained", []), ("alone", ["--skip-train"])):
        run_forked(2, [*flags, "--save", str(tmp_path / name), *more], tmp_path / "screen")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append({key: value for line in lines for key, value in json.loads(line).items() if "_loss" in key})
    trained, alone = found
    assert {"valid_loss", "test_loss"} <= alone.keys() and {key: trained[key] for key in alone} == alone
