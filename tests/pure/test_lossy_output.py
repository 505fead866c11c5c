"""Test that output lines that cannot be written are dropped and counted, and that the run continues."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.training import training
from megatron.training.reliability.lossy_output import LossyFile, lossy_output
from tests.forked import run_forked
from tests.tiny import TINY


def test_lines_on_a_full_disk_are_dropped_and_counted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, real, room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), os.write, [20]

    def write(number: int, data: bytes) -> int:
        if number == descriptor and room[0] < len(data):
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: room[0]]
        room[0] -= len(data)
        return real(number, data)

    stream = io.TextIOWrapper(io.BufferedWriter(LossyFile(descriptor)), line_buffering=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for number in range(5):
            print(f"line number {number}", file=stream, flush=True)
        room[0] = 1000
        print("later", file=stream, flush=True)
    said = "4 lines of output could not be written: No space left on device"
    assert (tmp_path / "log").read_text() == f"line number 0\nline n\n{said}\nlater\n"


def test_a_non_blocking_pipe_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    receives, sends = os.pipe()
    os.set_blocking(sends, False)
    monkeypatch.setattr("megatron.training.reliability.lossy_output.PATIENCE", 0.01)
    file = LossyFile(sends)
    size = 1 << 20
    assert file.write(b"a" * size) == size and file.lost == 1
    got = len(os.read(receives, size))
    assert 0 < got < size and file.write(b"b") == 1 and file.lost == 1
    os.close(receives)
    assert file.write(b"c\nd\n") == 4 and file.lost == 3 and file.why == os.strerror(errno.EPIPE)
    os.close(sends)


def test_unsupported_characters_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with lossy_output():
            print("to é")
        assert sys.stdout is log
    assert (tmp_path / "log").read_text() == "to \\xe9\n"


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_whose_output_is_full_trains_and_saves(fails: bool, tmp_path: Path) -> None:
    """If a run fails, its exit code is not replaced by the exit code of a failed flush."""

    def full(rank: int) -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        if fails:
            training.finish = fail

    def fail(run: object) -> None:
        raise AssertionError("planted")

    save = tmp_path / "save"
    argv = [*TINY.split(), "--log-interval", "1", "--save", str(save), "--save-interval", "2", "--no-async-save"]
    text = run_forked(1, argv, tmp_path / "screen", int(fails), prepare=full)
    assert "standard output: " in text and "could not be written: No space left on device" in text
    assert "Errno" not in text and ("planted" in text) == fails and read_latest(save) == 4
