"""Tests of checkpoints that are saved in the background. The tests check the written files, the files that remain if
the process is killed, and the effect of a failed save on the run."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.checkpoint_writer import CheckpointWriter
from megatron.core.dist_checkpointing.path_kind import LATEST, read_latest, saved_folders
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.core.parallel_state import Axis, initialize_model_parallel
from megatron.extensions.operate.checkpoint_cleanup.flags import RetentionFlags
from megatron.extensions.operate.checkpoint_cleanup.retention import retain
from megatron.training.checkpoints.loading import choose_checkpoint
from megatron.training.run import TrainingRun
from tests.harness import run_world, train_to_the_end
from tests.tiny import TINY

ROWS = 40


def start(rank: int, root: Path, **options: Any) -> tuple[CheckpointWriter, torch.Tensor, dict[str, ShardedBoxes]]:
    """Return a checkpoint writer, this rank's half of a tensor, and the dictionary of tensors to save."""
    state = initialize_model_parallel()
    part = torch.zeros(ROWS, 3)
    tensors = {"model.a": ShardedBoxes((2 * ROWS, 3), [((rank * ROWS, 0), part)])}
    saver = CheckpointWriter(root, state.world, **options)
    saver.pause = 0.0
    return saver, part, tensors


def test_a_save_keeps_the_newer_latest_checkpoint_of_another_run(tmp_path: Path) -> None:
    """Between two saves of this run, a second run saves a newer checkpoint to the same folder."""
    saver, tensors = CheckpointWriter(tmp_path, Axis()), {"model.a": ShardedBoxes((3,), [((0,), torch.zeros(3))])}
    saver.pause = 0.0
    for iteration, others in ((1, None), (2, "40"), (50, None)):
        if others is not None:
            (tmp_path / LATEST).write_text(others)
        saver.save(iteration, tensors, {})
        saver.wait()
    first, *refused, last = saver.reports()
    assert first.error is None and last.error is None and read_latest(tmp_path) == 50
    assert len(refused) == saver.attempts and not (tmp_path / "iter_0000002").exists()
    assert "names iteration 40, which this run has not saved: another run" in str(refused[0].error)


def save_until_killed(rank: int, world_size: int, root: Path, victim: int, delay: float, saved: int) -> None:
    """Save repeatedly. Rank `victim` is killed `delay` seconds after it has completed `saved` saves."""
    saver, part, tensors = start(rank, root, cleanups=(partial(retain, RetentionFlags(keep_last=2)),))
    for iteration in range(1, 10_000):
        if rank == victim and iteration == saved + 1:
            saver.wait()
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        part.fill_(iteration)
        saver.save(iteration, tensors, {"n": iteration})


def test_a_kill_at_any_moment_leaves_a_loadable_latest(tmp_path: Path) -> None:
    moments = random.Random(7)
    for number in range(4):
        victim, delay, saved = moments.randrange(2), moments.uniform(0.0, 0.6), int(number > 1)
        with pytest.raises(RuntimeError):
            run_world(2, save_until_killed, tmp_path, victim, delay, saved)
        said: list[str] = []
        checkpoint = choose_checkpoint(tmp_path, Axis(), said.append)
        if checkpoint is None:
            assert not saved and not saved_folders(tmp_path)
            continue
        iteration = checkpoint.payload["n"]
        assert not [line for line in said if line.startswith("skipped")]
        assert (checkpoint.read("model.a") == iteration).all()


def change_while_saving(rank: int, world_size: int, root: Path) -> list[int]:
    saver, part, tensors = start(rank, root, cleanups=(partial(retain, RetentionFlags(keep_last=2)),))
    saver.held.append(root / "iter_0000002")
    for iteration in range(1, 7):
        part.fill_(iteration)
        saver.save(iteration, tensors, {"n": iteration})
        part.fill_(-1.0)  # overwrites the tensors during the save, as a training step would
    saver.close()
    reports = saver.reports()
    assert all(report.complete and report.error is None for report in reports)
    return [report.iteration for report in reports]


def test_a_save_contains_the_state_at_its_call(tmp_path: Path) -> None:
    assert run_world(2, change_while_saving, tmp_path) == [[1, 2, 3, 4, 5, 6]] * 2
    assert sorted(saved_folders(tmp_path)) == [2, 5, 6] and read_latest(tmp_path) == 6
    for number, folder in saved_folders(tmp_path).items():
        assert (storage.Checkpoint(folder).read("model.a") == number).all()


def break_disk(times: int, folder: str = "") -> None:
    """Make the next `times` writes of this process to paths that contain `folder` fail with a disk-full error."""
    left = [times]
    original = storage.DataWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        if left[0] and folder in str(self.path):
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, *args)

    storage.DataWriter.write_data = write_data


def save_on_a_bad_disk(rank: int, world_size: int, root: Path, failures: int) -> list[tuple[int, bool, int, str]]:
    saver, _, tensors = start(rank, root)
    saver.save(1, tensors, {})
    saver.wait()
    if rank == 1:
        break_disk(failures)
    for iteration in (2, 3):
        saver.save(iteration, tensors, {})
    saver.close()
    return [(found.iteration, found.complete, found.attempts_left, found.error or "") for found in saver.reports()]


@pytest.mark.parametrize("failures", [1, 3])
def test_failed_saves_are_retried_and_known_on_every_rank(tmp_path: Path, failures: int) -> None:
    first, second = run_world(2, save_on_a_bad_disk, tmp_path, failures)
    assert first == second
    failed = [report for report in first if not report[1]]
    assert [report[2] for report in failed] == [2, 1, 0][:failures]
    assert all(report[0] == 2 and "on rank 1" in report[3] and "No space left" in report[3] for report in failed)
    size = sum(file.stat().st_size for file in (tmp_path / "iter_0000003").iterdir())
    needed = {int(re.search(r"it takes ([\d,]+) bytes", report[3])[1].replace(",", "")) for report in failed}  # type: ignore[index]
    assert len(needed) == 1 and 0 < min(needed) < size and f" bytes are free in {tmp_path}" in failed[0][3]
    assert [report[0] for report in first if report[1]] == ([1, 3] if failures == 3 else [1, 2, 3])
    assert read_latest(tmp_path) == 3 and not list(tmp_path.glob("*.tmp"))


MODEL = f"{TINY} --train-iters 8 --log-interval 1 --save-interval 2 --tp 2".split()


def train_on_a_bad_disk(rank: int, world_size: int, broken: str, *argv: str) -> None:
    if rank == 1 and broken:
        break_disk(3, broken)

    def prepare(run: TrainingRun) -> None:
        assert run.saver.writer is not None
        run.saver.writer.pause = 0.0

    train_to_the_end(rank, world_size, [*MODEL, *argv], prepare)


def test_a_failed_save_does_not_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_world(2, train_on_a_bad_disk, "iter_0000004", "--save", str(tmp_path))
    assert sorted(saved_folders(tmp_path)) == [2, 6, 8] and read_latest(tmp_path) == 8
    shown = capfd.readouterr().err
    lines = [line for line in shown.splitlines() if "iteration 4 was not saved" in line]
    # all ranks fail for the same reason, which is reported only once
    assert len(lines) == 3 and shown.count("No space left") == 1, shown
    assert "No space left" in lines[0] and "2 more attempts" in lines[0] and "given up" in lines[2]


def test_a_failed_save_ends_the_run_when_asked_to_or_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"{CheckpointError.__name__}: .*fatal-save-errors"):
        run_world(2, train_on_a_bad_disk, "iter_0000002", "--save", str(tmp_path), "--fatal-save-errors")
    for flag in ("--async-save", "--no-async-save"):
        with pytest.raises(RuntimeError, match=f"{CheckpointError.__name__}: .*this was the last save of the run"):
            run_world(2, train_on_a_bad_disk, "iter_0000008", "--save", str(tmp_path), flag)
        assert read_latest(tmp_path) == 6


def test_background_saves_equal_synchronous_saves(tmp_path: Path) -> None:
    for name, flag in (("back", "--async-save"), ("front", "--no-async-save")):
        run_world(2, train_on_a_bad_disk, "", "--save", str(tmp_path / name), flag)
    back, front = (choose_checkpoint(tmp_path / name, Axis()) for name in ("back", "front"))
    assert back is not None and front is not None and back.tensors.keys() == front.tensors.keys()
    assert all(torch.equal(back.read(key), front.read(key)) for key in back.tensors)


def test_replacing_checkpoints_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "save")
    run_world(2, train_on_a_bad_disk, "", "--save", folder)
    assert "later iterations" not in capfd.readouterr().out
    run_world(2, train_on_a_bad_disk, "", "--save", folder, "--exit-interval", "2")
    said = f"--save {folder} holds checkpoints of later iterations, up to 8; this run starts at iteration 0 and will"
    shown = capfd.readouterr().out
    assert shown.count(said) == 1 and "to resume from the latest, add --load" in shown
