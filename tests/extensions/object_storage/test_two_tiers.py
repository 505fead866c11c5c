"""Checkpoints are saved to the local disk and uploaded during training. The tests cover kills, outages, and the choice
of the checkpoint from which a run resumes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import saved_folders
from megatron.extensions import load
from megatron.extensions.operate.object_storage.two_tiers import local_root
from tests.apart import losses_in
from tests.extensions.object_storage.server import (
    BUCKET,
    Faults,
    credentials,
    environment,
    faulty_proxy,
    file_system,
    s3_server,
)
from tests.forked import forked_ranks, join, run_forked
from tests.rules import problems
from tests.tiny import TINY

pytest.importorskip("s3fs")
FLAGS = [*TINY.split(), "--train-iters", "12", "--log-interval", "1"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    load()
    with s3_server() as port, environment(credentials(port)):
        yield port


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    folder = tmp_path_factory.mktemp("whole")
    run_forked(1, [*FLAGS, "--save", str(folder)], folder / "screen")
    return losses_in(folder / "metrics.jsonl")


def flags_of(url: str, local: Path) -> list[str]:
    intervals = ["--save-interval", "4", "--save-local-interval", "1", "--storage-retry-seconds", "2"]
    return [*FLAGS, "--save", url, "--load", url, "--save-local", str(local), *intervals]


def stored(url: str) -> list[str]:
    place = url.removeprefix("s3://")
    return sorted(name.rpartition("/")[2] for name in file_system().ls(place, detail=False) if "iter_" in name)


def losses_at(url: str, tmp_path: Path) -> list[tuple[int, float]]:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file_system().cat_file(f"{url.removeprefix('s3://')}/metrics.jsonl"))
    return losses_in(file)


def started_at(said: str) -> int:
    return max(map(int, re.findall(r"starting at iteration (\d+)", said)), default=0)


def test_checkpoints_of_save_interval_are_uploaded_and_the_newest_are_kept(
    port: int, tmp_path: Path, expected: list[tuple[int, float]]
) -> None:
    url = f"s3://{BUCKET}/plain"
    said = run_forked(2, [*flags_of(url, tmp_path), "--keep-last", "2", "--tp", "2"], tmp_path / "screen")
    root = local_root(str(tmp_path), url)
    assert f"saved checkpoint at iteration 7 to {root} in" in said
    assert f"uploaded checkpoint of iteration 12 to {url} in" in said
    assert stored(url) == ["iter_0000008", "iter_0000012"] and sorted(saved_folders(root)) == [11, 12]
    events = file_system().cat_file(f"{BUCKET}/plain/run_events.jsonl").decode().splitlines()
    uploads = [event for event in map(json.loads, events) if event["event"] == "upload"]
    assert [event["iteration"] for event in uploads][-1] == 12 and uploads[-1]["bytes"] > 0
    shutil.rmtree(root)
    again = run_forked(1, [*flags_of(url, tmp_path), "--train-iters", "14"], tmp_path / "screen")
    assert f"loaded checkpoint of iteration 12 from {url}: starting at iteration 12" in again


def test_kills_and_outages_lose_nothing_that_was_saved(
    port: int, tmp_path: Path, expected: list[tuple[int, float]]
) -> None:
    """Each launch is killed at a random moment. In every second launch, the object store becomes unavailable before the
    launch is killed."""
    url, local, moments = f"s3://{BUCKET}/killed", tmp_path / "local", random.Random(3)
    root, screen = local_root(str(local), url), tmp_path / "screen"
    faults = Faults(seed=3, cut=0.05)
    newer = saved = 0
    with faulty_proxy(port, faults) as proxy:
        for number in range(4):
            before = max(saved_folders(root), default=0)
            with environment(credentials(proxy)), forked_ranks(1, flags_of(url, local), screen) as processes:
                deadline = time.monotonic() + 60
                while max(saved_folders(root), default=0) < before + 2 and time.monotonic() < deadline:
                    time.sleep(0.02)
                faults.down_until = time.monotonic() + (60 if number % 2 else 0)
                time.sleep(moments.random())
                os.kill(processes[0].pid, signal.SIGKILL)
                join(processes)
                faults.down_until = 0.0
            said = screen.read_text()
            newer += "newer than those in" in said
            assert started_at(said) >= saved
            saved = max(map(int, re.findall(r"saved checkpoint at iteration (\d+)", said)), default=saved)
    said = run_forked(1, flags_of(url, local), screen)
    assert newer + ("newer than those in" in said) and started_at(said) >= saved > 0
    assert stored(url)[-1] == "iter_0000012" and losses_at(url, tmp_path) == expected


def test_a_damaged_local_checkpoint_is_skipped(port: int, tmp_path: Path, expected: list[tuple[int, float]]) -> None:
    url = f"s3://{BUCKET}/damaged"
    run_forked(1, [*flags_of(url, tmp_path), "--exit-interval", "4"], tmp_path / "screen")
    root = local_root(str(tmp_path), url)
    file_system().rm(f"{BUCKET}/damaged", recursive=True)
    (root / "uploaded").unlink()
    for file in (root / "iter_0000004").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    said = run_forked(1, flags_of(url, tmp_path), tmp_path / "screen")
    assert f"skipped local checkpoint {root / 'iter_0000004'}" in said
    assert "loaded checkpoint of iteration 3 from" in said and losses_at(url, tmp_path) == expected[3:]


def test_a_run_that_does_not_resume_moves_local_checkpoints_away(port: int, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/again"
    flags = [*flags_of(url, tmp_path), "--exit-interval", "2"]
    run_forked(1, flags, tmp_path / "screen")
    place = flags.index("--load")
    said = run_forked(1, [*flags[:place], *flags[place + 2 :]], tmp_path / "screen")
    assert "local checkpoints up to iteration 2 are moved to" in said and "starting at iteration" not in said


def test_configuration_rules() -> None:
    assert "has no interval" in "".join(problems("--save /tmp/x --save-local /tmp/y", 1, TINY))
