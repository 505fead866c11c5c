"""Test that tools/replay_step.py replays the last step of a diverging run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.apart import read_records
from tests.cli.test_training import MODEL
from tests.forked import run_forked
from tools.replay_step import main


def test_a_diverging_run_leaves_a_step_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = [
        *MODEL,
        "--lr",
        "1e6",
        "--residual-multiplier",
        "1e6",
        "--embedding-multiplier",
        "1e6",
        "--clip-grad",
        "0",
        "--log-straggler",
    ]
    screen = run_forked(1, [*huge, "--save", str(tmp_path)], tmp_path / "screen", code=1)
    report = screen[screen.index("RUN FAILED") :]
    assert "iteration 2 is not finite (loss nan, gradient norm nan); first in the forward pass: " in report
    assert "Traceback" not in report and "--iterations-to-skip 2" in report
    assert "slowest ranks, own time per step (x of the median) | data: rank 0 on " in screen
    assert read_records(tmp_path / "metrics.jsonl")[0]["straggler_forward_rank"] == 0

    folder = tmp_path / "nan" / "iter_0000002"
    assert main([str(folder)]) == 0
    found = json.loads((folder / "finding.json").read_text())["finding"]
    assert capsys.readouterr().out.count(f"first in the forward pass: {found['module']} (rank 0") == 2
    with pytest.raises(ValueError, match="--hidden-size"):
        main([str(folder), "--", "--tp", "3"])
    with pytest.raises(ValueError, match="holds no saved step"):
        main([str(tmp_path)])
