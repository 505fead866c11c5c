"""Tests of learning-rate sweeps: the best learning rate of a known loss curve, and resuming a sweep."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tiny import TINY
from tools.sweep_rates import _last_loss, best_rate, main, next_rate, table


def curve(at: float, rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3, 8e-3)) -> dict[float, float]:
    """Return losses on a parabola over log2(rate) whose minimum is 3 at the rate `at`."""
    return {rate: 3 + 0.5 * math.log2(rate / at) ** 2 for rate in rates}


def test_the_minimum_of_a_parabola_is_found() -> None:
    for rates in ((1e-3, 2e-3, 4e-3, 8e-3), (1e-3, 3e-3, 4e-3)):
        found = best_rate(curve(2.7e-3, rates))
        assert found is not None and found.rate == pytest.approx(2.7e-3) and found.loss == pytest.approx(3)
    found = best_rate(curve(2.2e-3) | {4e-3: math.inf, 8e-3: math.inf})
    assert found is not None and found.rate == 2e-3


def test_a_minimum_at_an_end_needs_another_rate() -> None:
    assert best_rate(curve(1e-4)) is None and next_rate(curve(1e-4)) == pytest.approx(5e-4)
    assert best_rate(curve(1.0)) is None and next_rate(curve(1.0)) == pytest.approx(16e-3)
    assert next_rate(curve(2e-3)) is None
    assert next_rate({1e-3: math.inf, 2e-3: math.inf}) == pytest.approx(5e-4)


def test_parameter_groups_are_compared() -> None:
    lines = table({"a/1": curve(2e-3), "a/2": curve(3e-3), "b/1": curve(2e-3), "b/2": curve(1e-4)})
    assert lines[-2:] == [
        "a: best rates within a factor 1.50",
        "b: best rates are not all known; give more --rates, or --extend",
    ]


def test_a_sweep_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{TINY} --train-iters 1 --eval-interval 1 --eval-iters 1".split()
    own = ["--output", str(tmp_path), "--rates", "1e-3", "1e5", "--case", "tiny/one --hidden-dropout 0"]
    assert main([*own, "--", *flags]) == 0
    assert "tiny/one lr 0.001 seed 1234: " in capsys.readouterr().out
    results = sorted(tmp_path.glob("tiny/one/*.json"))
    assert [json.loads(result.read_text())["rate"] for result in results] == [0.001, 1e5]
    assert main([*own, "--", *flags]) == 0
    assert "seed" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="belongs to a run with other flags"):
        main([*own, "--", *flags, "--weight-decay", "0.5"])


def test_a_nan_loss_counts_as_diverged(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for text, found in (('"NaN"', None), ('"Infinity"', None), ("NaN", None), ("2.5", 2.5)):
        metrics.write_text(f'{{"iteration": 1, "valid_loss": 2.0}}\n{{"iteration": 2, "valid_loss": {text}}}\n')
        assert _last_loss(metrics, tmp_path / "log") == found


def test_wrong_flags_are_refused(tmp_path: Path) -> None:
    own = ["--output", str(tmp_path), "--case", "a", "--case", "a --no-bias", "--rates", "1"]
    with pytest.raises(ValueError, match=r"--case a: is given more than once\n--rates: give two or more"):
        main(own)
    own = ["--output", str(tmp_path), "--case", "a --no-such-flag", "--rates", "1", "2"]
    with pytest.raises(ValueError, match="the run ended with exit code 2"):
        main(own)
