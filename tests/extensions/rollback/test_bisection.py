"""tools/bisect_spike.py finds the cause of a spike, for each of three planted causes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from megatron.extensions.operate.rollback.bisection import largest_rise
from megatron.extensions.operate.rollback.branches import Change, branch, config_of
from tests.corpus import write_documents
from tests.extensions.rollback.runs import Run
from tools.bisect_spike import main

SPIKE, SEQUENCE, DOCUMENTS = 14, 8, 100


def written(folder: Path, bad: Collection[int]) -> str:
    """Write documents that consist of one sample each. The documents in `bad` consist of unusual tokens."""
    noise = np.random.default_rng(1)
    documents = [noise.integers(20, 50, SEQUENCE) if number in bad else range(SEQUENCE) for number in range(DOCUMENTS)]
    folder.mkdir()
    return write_documents(folder / "data", documents)


@pytest.fixture(scope="module")
def of_step(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Return the documents in the batch of a step."""
    folder = tmp_path_factory.mktemp("sound")
    run = Run(folder / "run", written(folder / "data", ()))
    run.start("--exit-interval 12")
    loaded = config_of(run.save, run.save / "iter_0000012", [])
    parts = branch(loaded, None, SPIKE, Change(looks_at=SPIKE)).parts
    return [int(part.origin.rpartition(":")[2].rpartition("+")[0]) for part in parts if len(part.tokens) == SEQUENCE]


def said_of(run: Run, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main([str(run.save), *argv]) == 0
    said = capsys.readouterr().out
    print(said)
    return said


def test_a_bad_document_is_named(of_step: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", written(tmp_path / "data", of_step[1:2]))
    run.start("--save-interval 5 --rollback-on-spike --rollback-steps 2")
    said = said_of(run, capsys, "--", "--tp", "2")
    assert "branches from the checkpoint of iteration 10" in said
    assert f"verdict: document {of_step[1]} of data" in said and "text: tokens " in said


def test_a_bad_batch_is_named(of_step: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", written(tmp_path / "data", of_step))
    run.start("--save-interval 5")
    said = said_of(run, capsys, "--from", "5")
    assert "branches from the checkpoint of iteration 5" in said
    assert f"verdict: the batch of iteration {SPIKE}" in said


def test_a_too_high_learning_rate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", written(tmp_path / "data", ()))
    run.start("--exit-interval 12")
    run.start("--lr 1.0")
    assert "verdict: the learning rate: held at 0.03 there is no spike" in said_of(run, capsys)


def test_the_largest_rise() -> None:
    records = [{"iteration": number, "lm_loss": loss} for number, loss in enumerate([9, 3, 3, 3, 3, 3, 2, 5, 2], 1)]
    assert largest_rise(records) == 8
    with pytest.raises(ValueError, match="too few to find a spike"):
        largest_rise(records[:4])
