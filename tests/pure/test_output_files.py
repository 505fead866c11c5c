"""Test that output files are either complete or absent. If the output path is a device, a pipe or a link, it is not
replaced by a file."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path, PurePath
from typing import ClassVar

import pytest

from megatron.core.dist_checkpointing.file_storage import STORAGES, Storage, located, storage_of
from megatron.core.fsync import whole_file
from megatron.training.config.arguments import parse_args
from megatron.training.config.output_files import why_unwritten
from megatron.training.metrics.sinks import JsonLinesSink, open_sinks
from megatron.training.reliability.run_status import ExitCode, Outcome
from tools import build_corpus


def test_a_file_is_complete_or_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with whole_file(path) as file:
        file.write_text("first")
        assert not path.exists()
    with suppress(OSError), whole_file(path) as file:
        file.write_text("sec")
        raise OSError
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Links must be preserved. For example, /dev/stdout is a link, which points to a file if the output of the program
    is redirected to the file."""
    link = tmp_path / "link"
    link.symlink_to("target")
    for text in ("first", "second"):
        with whole_file(link) as file:
            file.write_text(text)
        assert link.is_symlink() and (tmp_path / "target").read_text() == text


def test_a_pipe_is_written_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    Outcome(pipe).end(ExitCode.DONE)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.read(reading, 99).startswith(b"name=DONE\n")
    os.close(reading)


def test_a_file_without_room_is_named_and_standard_output_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.py").write_text("# text\n" * 9999)
    command = f"ulimit -f 16; {sys.executable} -B {build_corpus.__file__} --output x --source source"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == "error: x: File too large\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    unnamed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert why_unwritten(unnamed) == "a file: cannot be written: No space left on device"


class FullDevice(io.BytesIO):
    """Simulated full device. Unlike a file, a device cannot be truncated after an incomplete line."""

    name = "full"

    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, _: int | None = None) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_a_full_device_for_metrics_does_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", 0)
    sink.close()
    monkeypatch.setattr(sink, "_file", FullDevice())
    for iteration in (1, 2):
        sink.write({"iteration": iteration})
    assert capsys.readouterr().err.count("metrics.jsonl for now: [Errno 28] No space") == 1


def test_metrics_continue_where_their_file_was_deleted_or_renamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "save"
    path = folder / "metrics.jsonl"
    sink = JsonLinesSink(path, 0)
    sink.write({"iteration": 1})
    path.rename(folder / "old.jsonl")
    sink.write({"iteration": 2})
    shutil.rmtree(folder)
    sink.write({"iteration": 3})
    assert not folder.exists()
    folder.mkdir()
    sink.write({"iteration": 4})
    sink.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [3, 4]
    said = capsys.readouterr().err
    assert said.count("records continue in a new file") == 2 and said.count("cannot write metrics to") == 1


class KeptStorage(Storage):
    """In-memory storage whose files are stored in the class, so that all instances share them."""

    files: ClassVar[dict[PurePath, bytes]] = {}

    def names(self, folder: PurePath) -> list[str]:
        return sorted(path.name for path in self.files if path.parent == folder)

    def size(self, path: PurePath) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        return self.files[path][start:][:length]

    def write(self, path: PurePath, data: bytes) -> None:
        self.files[path] = data

    def remove(self, path: PurePath) -> None:
        del self.files[path]


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_restarted_at_its_end_repeats_no_record(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stored and "kept" not in STORAGES:
        STORAGES.register("kept", KeptStorage)
    file = f"kept://{tmp_path.name}/metrics.jsonl" if stored else str(tmp_path / "metrics.jsonl")
    config = parse_args(["--metrics-file", file])
    for resumed in (0, 2, 2):
        (sink,) = open_sinks(config, resumed)
        for number in (1, 2):
            if number > resumed:
                sink.write({"iteration": number, "lm_loss": 3.0, "time": 1.0})
        sink.write({"iteration": 2, "test_loss": 2.5, "time": 2.0 + resumed})
        sink.close()
    (sink,) = open_sinks(config, 2)
    sink.write({"iteration": 2, "test_loss": 2.25, "time": 9.0})
    sink.close()
    lines = map(json.loads, storage_of(located(file)).read(located(file)).splitlines())
    assert [each.get("test_loss") for each in lines] == [None, None, 2.5, 2.25]


def test_metrics_are_not_written_to_a_folder_that_the_run_has_lost(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("lost")

    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, 0, refuse)
    sink.write({"iteration": 1})
    other = tmp_path / "other"
    other.write_text("another run's")
    other.rename(path)
    sink.write({"iteration": 2})
    sink.close()
    assert path.read_text() == "another run's"
