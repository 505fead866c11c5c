"""Tests of runs that save to a failing remote storage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.apart import ROOT, losses_in
from tests.forked import forked_ranks, join, run_forked, run_program
from tests.tiny import TINY

FLAKY = """
import os
import signal
from pathlib import Path

from examples.memory_storage import MemoryStorage
from megatron.core.dist_checkpointing.file_storage import STORAGES

FOLDER = Path(__file__).parent


def first(name):
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@STORAGES.register("flaky")
class FlakyStorage(MemoryStorage):
    def write(self, path, data):
        if path.parent.name == "iter_0000002" and path.name.startswith("__1") and first("failed"):
            raise OSError("the connection is lost")
        super().write(path, data)

    def publish(self, final):
        if final.name == "iter_0000006" and first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().publish(final)
"""


@pytest.fixture
def server() -> Iterator[str]:
    """Start an in-memory storage server, and yield its HOST:PORT."""
    command = [sys.executable, "-m", "examples.memory_storage", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().removeprefix("mem://")
        finally:
            process.kill()


def objects(server: str) -> list[str]:
    with urlopen(f"http://{server}/run/?list") as answer:
        return json.loads(answer.read())


def test_a_run_resumes_bitwise_from_a_storage_without_renames(tmp_path: Path, server: str) -> None:
    flags = [*TINY.split(), "--tp", "2", "--train-iters", "8", "--save-interval", "2", "--log-interval", "1"]
    run_forked(2, [*flags, "--save", str(tmp_path / "whole")], tmp_path / "screen")
    (tmp_path / "flaky.py").write_text(FLAKY)
    url, screen = f"flaky://{server}/run", tmp_path / "screen"
    stored = [*flags, "--extension", str(tmp_path / "flaky.py"), "--save", url, "--load", url, "--keep-last", "2"]
    stored += ["--export-hf-interval", "8", "--export-hf-dir", str(tmp_path / "hf")]
    with forked_ranks(2, stored, screen) as ranks:
        codes = join(ranks)
    assert codes[0] == -9 and codes[1] != 0, "rank 0 was killed before it published iteration 6"
    assert "checkpoint of iteration 2 was not saved" in screen.read_text() and "2 more attempts" in screen.read_text()
    assert "iter_0000006/.unfinished" in objects(server)
    said = run_forked(2, stored, screen)
    assert f" loaded checkpoint of iteration 4 from {url}: starting at iteration 4" in said and "skipped" not in said
    left = objects(server)
    assert not [name for name in left if ".unfinished" in name or ".written" in name]
    folders = {name.partition("/")[0] for name in left if "/" in name}
    assert folders == {"iter_0000004", "iter_0000006", "iter_0000008"}, (
        "the second run keeps the checkpoint that it loaded"
    )
    extension = ["--extension", str(tmp_path / "flaky.py")]
    same = run_program("tools/inspect_checkpoint.py", *extension, url, tmp_path / "whole", code=0)
    assert "equal" in same.stdout
    exported = tmp_path / "exported"
    run_program("tools/convert_checkpoint.py", *extension, "--input", url, "--output", exported, code=0)
    run_program("tools/inspect_checkpoint.py", exported, tmp_path / "hf" / "iter_0000008", code=0)
    for name, run in (("merged", url), ("merged_whole", tmp_path / "whole")):
        words = ["--input", run, "--last", "2", "--output", tmp_path / name]
        run_program("tools/merge_checkpoints.py", *extension, *words, code=0)
    run_program("tools/inspect_checkpoint.py", tmp_path / "merged", tmp_path / "merged_whole", code=0)
    with urlopen(f"http://{server}/run/metrics.jsonl") as answer:
        (tmp_path / "metrics.jsonl").write_bytes(answer.read())
    assert losses_in(tmp_path / "metrics.jsonl") == losses_in(tmp_path / "whole" / "metrics.jsonl")


def test_a_storage_that_does_not_answer_is_reported_with_the_flag(tmp_path: Path) -> None:
    flags = [*TINY.split(), "--extension", str(ROOT / "examples" / "memory_storage.py")]
    said = run_forked(1, [*flags, "--save", "mem://127.0.0.1:9/run"], tmp_path / "screen", code=2)
    assert "--save mem://127.0.0.1:9/run: cannot be written: " in said
    said = run_forked(1, [*flags, "--load", "mem://127.0.0.1:9/run"], tmp_path / "screen", code=2)
    assert "--load mem://127.0.0.1:9/run: cannot be read: " in said
    tool = ["--extension", ROOT / "examples" / "memory_storage.py", "--load", "mem://127.0.0.1:9/run", "--prompt", "a"]
    done = run_program("tools/generate_text.py", *tool, code=2)
    assert "error: mem://127.0.0.1:9/run: " in done.stderr and "Traceback" not in done.stderr


def test_a_url_without_a_storage_is_refused(tmp_path: Path) -> None:
    tool = run_program("tools/inspect_checkpoint.py", "other://bucket/run", code=2)
    assert "other://bucket/run is a URL, but no storage is registered for other://; use" in tool.stderr
    secret = run_program("tools/inspect_checkpoint.py", "mem://me:hunter22@127.0.0.1:9/run", code=2)
    assert "mem://***@127.0.0.1:9/run contains credentials, which would be saved with the run" in secret.stderr
    said = run_forked(1, [*TINY.split(), "--save", "mem://me:hunter22@127.0.0.1:9/run"], tmp_path / "screen", code=2)
    assert "contains credentials" in said and "hunter22" not in said + secret.stderr
    said = run_forked(1, [*TINY.split(), "--save", "other://bucket/run"], tmp_path / "screen", code=2)
    assert "--save other://bucket/run: is a URL, but no storage is registered for other://; use" in said
