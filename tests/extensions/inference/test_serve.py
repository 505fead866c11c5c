"""Tests of tools/serve.py with a checkpoint, on one rank and on several ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forked_ranks, join
from tests.limits import HANG, wait_for
from tools.common import run_tool
from tools.serve import main


@contextmanager
def serving(checkpoint: str, screen: Path, ranks: int, *flags: str) -> Iterator[tuple[str, list[Any]]]:
    """Start tools/serve.py on `ranks` ranks, and yield the URL of the server and the processes of the ranks."""
    argv = ["--load", checkpoint, "--device", "cpu", "--port", "0", *flags]
    with forked_ranks(ranks, argv, screen, main=lambda argv: run_tool(partial(main, argv))) as processes:
        ready = re.compile(r"serving checkpoints at (http://\S+)/v1")
        found = wait_for(lambda: ready.search(screen.read_text()), processes[:1], screen.read_text)
        yield found[1], processes


def ask(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(url + "/v1/completions", json.dumps(body).encode(), timeout=HANG) as found:
        return json.loads(found.read())


LAYOUTS = [(1, ""), (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")]
BODIES: list[dict[str, Any]] = [
    {"prompt": "né", "max_tokens": 8, "seed": 5, "n": 2},
    {"prompt": ["a", "bcd"], "max_tokens": 5, "temperature": 0.0, "echo": True},
]


def test_every_layout_serves_the_same_texts_until_a_signal(checkpoint: str, tmp_path: Path) -> None:
    found = []
    for ranks, layout in LAYOUTS:
        with serving(checkpoint, tmp_path / "screen", ranks, *layout.split()) as (url, processes):
            found.append([ask(url, body)["choices"] for body in BODIES])
            for process in processes:  # as torchrun does
                os.kill(process.pid, signal.SIGTERM)
            assert join(processes) == [0] * ranks, (tmp_path / "screen").read_text()
    assert found[0] == found[1]


@pytest.mark.parametrize(("killed", "layout"), [(1, "--pipeline"), (0, "--tensor")])
def test_a_rank_that_is_killed_ends_the_server(killed: int, layout: str, checkpoint: str, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path / "screen", 2, f"{layout}-model-parallel-size", "2") as (_, processes):
        processes.pop(killed).kill()
        assert join(processes) == [1]
    line = f"error: rank {1 - killed} of 2: another rank has ended, or this one failed; the server ends"
    assert line in (tmp_path / "screen").read_text()


MISTAKES = [
    ("--batch-size 0 --port 70000", "0: must be at least 1\nerror: --port 70000 must be at most 65535"),
    ("--load /nowhere", "--load /nowhere is missing: there is no such file or folder; give a checkpoint, "),
    ("--host 256.0.0.1", "error: "),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_user_errors_are_explained(
    checkpoint: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_tool(lambda: main(["--load", checkpoint, "--device", "cpu", "--port", "0", *flags.split()]))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_fastapi_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tools.serve.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"serving needs FastAPI and uvicorn: pip install 'paritrain\[serve\]'"):
        main(["--load", str(tmp_path)])
