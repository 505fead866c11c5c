"""Tests of runs that resume from damaged checkpoints: the messages, the loaded checkpoint, and the final result. The
tests also cover a full disk.

A run of two processes under TP 2 saves at iterations 2, 4 and 6 and then stops. The same command resumes from a copy
whose two newest checkpoints are damaged and continues to iteration 8. The last checkpoint of the resumed run is
compared bit for bit with that of an undisturbed run. A limit on the file size simulates a full disk.
test_damaged_checkpoints.py damages files in every way.
"""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.parallel_state import Axis
from megatron.training import training
from megatron.training.checkpoints.loading import choose_checkpoint
from tests.forked import run_forked
from tests.pure.test_damaged_checkpoints import flip
from tests.tiny import TINY
from tools.inspect_checkpoint import differences

MODEL = f"{TINY} --tp 2 --log-interval 1 --save-interval 2 --train-iters 8".split()
SAID = re.compile(r".*(?:skipped checkpoint|using the latest|holds no checkpoint|not saved|not be written).*")


def train(save: Path, stop: int = 8, code: int = 0, prepare: Callable[[int], None] = lambda rank: None) -> str:
    """Train with two ranks, and stop at iteration `stop`. The run resumes from the folder to which it saves. Return the
    output."""
    argv = [*MODEL, "--save", str(save), "--load", str(save), "--exit-interval", str(stop)]
    return run_forked(2, argv, save.with_name("screen"), code, prepare=prepare)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two folders: the folder of a run of six iterations, copies of which the tests damage, and the folder of an
    undisturbed run of eight iterations."""
    base, whole = (tmp_path_factory.mktemp(name) / "save" for name in ("base", "whole"))
    for save, stop in ((base, 6), (whole, 8)):
        assert not SAID.search(train(save, stop))
    return base, whole


def assert_same_end(save: Path, whole: Path) -> None:
    one, other = (choose_checkpoint(folder, Axis()) for folder in (save, whole))
    assert one is not None and other is not None and one.payload["iteration"] == 8
    assert not differences(one, other)


def test_a_run_resumes_from_the_newest_whole_checkpoint(runs: tuple[Path, Path], tmp_path: Path) -> None:
    (base, whole), save = runs, tmp_path / "save"
    shutil.copytree(base, save)
    for number in (4, 6):
        flip(save / f"iter_000000{number}" / "__0_0.distcp")
    text = train(save)
    assert "loaded checkpoint of iteration 2 " in text
    assert_same_end(save, whole)
    assert all(text.count(f"skipped checkpoint {save}/iter_000000{number}") == 1 for number in (4, 6))


def test_a_run_reports_a_full_disk_and_resumes(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The disk becomes full before the run saves its second checkpoint. Then the same command runs again with free
    space."""
    save, step = tmp_path / "save", training.train_step

    def prepare(rank: int) -> None:
        def train_step(run: training.TrainingRun, *args: object) -> None:
            if run.progress.iteration == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
            step(run, *args)

        training.train_step = train_step

    train(save, 2)
    text = train(save, 6, 1, prepare)
    assert "loaded checkpoint of iteration 2 " in text and "this was the last save of the run" in text
    assert re.search(r"iteration 4 was not saved.*File too large.*\n(.*\n)*.*iteration 4 was not saved.*given up", text)
    assert "Traceback" not in text and "free space on the disk" in text
    text = train(save)
    assert "loaded checkpoint of iteration 2 " in text and not SAID.search(text)
    assert_same_end(save, runs[1])
