"""Tests of resuming a run with a different batch size. If the newest checkpoint is damaged, the run resumes from an
earlier checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apart import read_records
from tests.forked import run_forked
from tests.tiny import TINY

FLAGS = f"{TINY} --train-iters 8 --lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 1 --log-interval 1"


def records(folder: Path) -> list[tuple[int, int, float]]:
    """Return one tuple (iteration, consumed samples, learning rate) per step."""
    found = [record for record in read_records(folder / "metrics.jsonl") if "lm_loss" in record]
    return [(record["iteration"], record["consumed_samples"], record["learning_rate"]) for record in found]


def test_a_run_changes_its_batch_size_twice(tmp_path: Path) -> None:
    """The learning rate of each iteration stays the same. Only the number of samples per iteration changes."""
    folder, screen = tmp_path / "run", tmp_path / "screen"
    flags = [*FLAGS.split(), "--save", str(folder), "--load", str(folder), "--save-interval", "2"]
    run_forked(1, [*FLAGS.split(), "--save", str(tmp_path / "alone")], screen)
    run_forked(1, [*flags, "--exit-interval", "4"], screen)
    damaged = next((folder / "iter_0000004").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    said = run_forked(1, [*flags, "--global-batch-size", "2", "--exit-interval", "6"], screen)
    assert "6 iterations and 12 samples remain until iteration 8; the learning rate depends on the iteration" in said
    said = run_forked(1, [*flags, "--global-batch-size", "8"], screen)
    assert "changed since the checkpoint: --global-batch-size 2 -> 8; samples continue" in said
    assert "length: 8 iterations, 2 of them remaining, 32 samples" in said
    found = records(folder)
    assert [consumed for _, consumed, _ in found] == [4, 8, 10, 12, 14, 16, 24, 32]
    assert [lr for *_, lr in found] == pytest.approx([lr for *_, lr in records(tmp_path / "alone")], rel=1e-12)


def test_a_run_in_samples_counts_its_iterations(tmp_path: Path) -> None:
    folder, screen = tmp_path / "run", tmp_path / "screen"
    flags = [*TINY.replace("--train-iters 4", "--train-samples 24").split(), "--save", str(folder)]
    flags += ["--load", str(folder), "--log-interval", "1"]
    run_forked(1, [*flags, "--exit-interval", "3"], screen)
    said = run_forked(1, [*flags, "--global-batch-size", "2"], screen)
    assert "length: 9 iterations, 6 of them remaining, 24 samples" in said and "9/       9 |" in said
    assert records(folder)[-1][:2] == (9, 24)
