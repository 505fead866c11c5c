"""tools/bench/curve.py compares the loss curves of this library with loss curves of the transformers library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.apart import python_apart
from tools.bench.curve import OURS, ROUNDING, THEIRS, Curve, verdict


def test_the_first_losses_match_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    few = "--cpu --tiny --steps 6 --seeds 1 --precision bf16".split()
    done = python_apart("tools/bench/curve.py", "--output", str(tmp_path), *few, code=0)
    ours, theirs = (json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines())
    assert (ours["program"], theirs["program"]) == (OURS, THEIRS)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=ROUNDING["bf16"]) and len(ours["losses"]) == 6
    assert "bf16: first 5 losses within 0.0" in done.stdout


def test_a_different_loss_is_reported_with_the_spread_of_seeds() -> None:
    theirs = Curve(THEIRS, "bf16", 0, [4.0] * 20)
    own = [Curve(OURS, "bf16", 0, [4.001] * 20), Curve(OURS, "fp8", 0, [4.05] * 20), Curve(OURS, "bf16", 1, [4.2] * 20)]
    lines, alike = verdict([own[0], theirs, *own[1:]])
    assert alike and "difference +0.0010" in lines[0] and "fp8: first 5 losses within 1.25%" in lines[1]
    assert lines[2] == "2 seeds in bf16: from 4.0010 to 4.2000, standard deviation 0.1407"
    assert not verdict([Curve(OURS, "bf16", 0, [4.1]), theirs])[1]
