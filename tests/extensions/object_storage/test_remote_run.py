"""Tests of runs that save to an S3 server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apart import losses_in
from tests.cli.test_training import MODEL
from tests.extensions.object_storage.server import (
    BUCKET,
    Faults,
    credentials,
    environment,
    faulty_proxy,
    file_system,
    s3_server,
)
from tests.forked import run_forked, run_program
from tests.tiny import TINY

pytest.importorskip("s3fs")
URL = f"s3://{BUCKET}/run"
FLAGS = [*TINY.split(), "--train-iters", "6", "--save-interval", "2", "--log-interval", "1"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port, environment(credentials(port)):
        yield port


@pytest.fixture(autouse=True)
def empty(port: int) -> None:
    files = file_system()
    if files.exists(f"{BUCKET}/run"):
        files.rm(f"{BUCKET}/run", recursive=True)


def stored(name: str, to: Path) -> Path:
    to.write_bytes(file_system().cat_file(f"{BUCKET}/run/{name}"))
    return to


def test_a_run_resumes_bitwise_at_another_layout(tmp_path: Path) -> None:
    screen, local = tmp_path / "screen", tmp_path / "whole"
    exports = ["--export-hf-interval", "4"]
    for save in (str(local), URL):
        run_forked(2, [*FLAGS, "--tp", "2", "--save", save, "--exit-interval", "4", *exports], screen)
    same = run_program("tools/inspect_checkpoint.py", URL, local, code=0)
    assert "equal" in same.stdout
    for save in (str(local), URL):
        said = run_forked(1, [*FLAGS, "--save", save, "--load", save, "--keep-last", "2"], screen)
        assert f" loaded checkpoint of iteration 4 from {save}: starting at iteration 4" in said
    assert losses_in(stored("metrics.jsonl", tmp_path / "m.jsonl")) == losses_in(local / "metrics.jsonl")
    names = file_system().find(f"{BUCKET}/run")
    assert not [name for name in names if name.endswith((".unfinished", ".lease"))]
    assert {name.split("/")[2] for name in names if name.startswith(f"{BUCKET}/run/iter_")} == {
        "iter_0000004",
        "iter_0000006",
    }
    events = [json.loads(line) for line in stored("run_events.jsonl", tmp_path / "e.jsonl").read_text().splitlines()]
    traffic = [event for event in events if event["event"] == "storage"][-1]
    assert traffic["written"] > 0 and traffic["upload_memory"] > 0
    file_system().get(f"{BUCKET}/run/hf/iter_0000004", str(tmp_path / "hf"), recursive=True)
    run_program("tools/inspect_checkpoint.py", tmp_path / "hf", local / "hf" / "iter_0000004", code=0)
    converted = ("tools/convert_checkpoint.py", "--input", URL, "--output", f"{URL}/exported")
    run_program(*converted, code=0)
    assert "exists already" in run_program(*converted, code=2).stderr and f"{BUCKET}/run/exported/config.json" in (
        file_system().find(f"{BUCKET}/run/exported")
    )
    page = tmp_path / "report.html"
    run_program("tools/report.py", URL, "--against", local, "--output", page, "--no-plan", code=0)
    assert "iter_0000006" in page.read_text() or "Saves" in page.read_text()
    kept = "".join(path.read_text() for path in (tmp_path / "e.jsonl", stored("run_config.yaml", tmp_path / "c.yaml")))
    assert "test-secret-key" not in kept + screen.read_text() and "test-access-key" not in kept


def test_a_run_survives_a_failing_store(tmp_path: Path, port: int) -> None:
    """Connections are cut at random, and for a few seconds all connections are refused."""
    faults = Faults(seed=11, cut=0.05)

    def fail() -> None:
        files = file_system()
        while not files.exists(f"{BUCKET}/run/iter_0000002"):
            time.sleep(0.1)
        faults.down_until = time.monotonic() + 5

    with faulty_proxy(port, faults) as proxy:
        failing = threading.Thread(target=fail, daemon=True)
        failing.start()
        with environment(credentials(proxy)):
            said = run_forked(1, [*FLAGS, "--save", URL], tmp_path / "screen")
        failing.join()
    assert faults.cuts and faults.down_until and "given up" not in said
    run_forked(1, [*FLAGS, "--save", str(tmp_path / "whole")], tmp_path / "screen")
    run_program("tools/inspect_checkpoint.py", URL, tmp_path / "whole", code=0)


def test_only_one_of_two_runs_saves_to_a_url(tmp_path: Path) -> None:
    other = {"host": "far", "pid": 1, "namespace": "elsewhere", "started": "0", "token": "other", "since": "now"}
    holding = threading.Event()

    def renew() -> None:
        files, count = file_system(), 0
        while not holding.wait(0.2):
            count += 1
            files.pipe_file(f"{BUCKET}/run/.lease", json.dumps(other | {"renewals": count}).encode())

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        said = run_forked(1, [*FLAGS, "--save", URL], tmp_path / "screen", code=1)
    finally:
        holding.set()
    assert f"another run saves to {URL}: its rank 0 is process 1 on far, started now" in said


def test_a_step_that_cannot_be_saved_is_reported(tmp_path: Path) -> None:
    diverging = ["--lr", "1e6", "--residual-multiplier", "1e6", "--embedding-multiplier", "1e6", "--clip-grad", "0"]
    said = run_forked(1, [*MODEL, *diverging, "--save", URL], tmp_path / "screen", code=1)
    report = said[said.index("RUN FAILED") :]
    assert "is not finite" in report and "Traceback" not in report
    rule = f"--save {URL}: is a URL, but steps can be saved only to mounted file systems, so this step was not saved; "
    assert rule + "use --save FOLDER to save and replay such a step" in report
