"""The short form of `python -m tests.faults.corruption`. test_damaged_checkpoints.py damages files one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.corruption import DAMAGE, Bench, small_disk


def test_damaged_checkpoints_and_a_full_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    inflict, expected = DAMAGE["the two newest damaged"]
    outcome = bench.resume(inflict)
    assert outcome.loaded == expected and outcome.equal and len(outcome.said) == 2
    try:
        with small_disk(8) as disk:
            full, after = bench.fill_disk(disk)
    except OSError as error:
        pytest.skip(str(error))
    assert full.loaded == 2 and full.code == 1
    assert any("No space left" in line and "iteration 4" in line and "given up" in line for line in full.said)
    assert any("it was the last of the run" in line for line in full.said)
    assert after.loaded == 2 and after.equal and not after.said
