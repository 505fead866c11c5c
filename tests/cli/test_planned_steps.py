"""tools/bench/planned_steps.py predicts step times with all kernels, and with single kernels disabled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.kernels import LEFT_OUT
from tools.bench import planned_steps


def test_steps_without_kernels_are_longer() -> None:
    """The test also checks that planning without a kernel does not change the set of disabled kernels."""
    before = set(LEFT_OUT)
    whole = planned_steps.planned("sparse", "h200")
    without_kernel = planned_steps.planned("sparse", "h200", left_out=["divergence"])
    deterministic = planned_steps.planned("sparse", "h200", "--deterministic-mode")
    unfused = planned_steps.planned("sparse", "h200", "--no-fusions")
    assert without_kernel.milliseconds > 1.02 * whole.milliseconds
    # the two times are equal if the fastest kernels are deterministic
    assert deterministic.milliseconds >= whole.milliseconds
    assert unfused.milliseconds > 2 * whole.milliseconds and before == LEFT_OUT


def test_the_table_is_printed_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planned_steps, "PLANS", {"tiny": ("tiny", "--bf16")})
    monkeypatch.setattr(planned_steps, "LAYERS", {"tiny": 2})
    monkeypatch.setattr(planned_steps, "LEAST", 0.0)
    path = tmp_path / "steps.json"
    assert planned_steps.main(["--device", "h100", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    shown = capsys.readouterr().out
    assert not rows[0]["without"] and all(row["without"] in shown for row in rows)
    assert {row["without"] for row in rows} >= {"divergence", "--no-fusions"}
