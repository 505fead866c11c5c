"""Tests of the goodput that runs report. The runs use one or two ranks, evaluate, are killed, and resume."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megatron.extensions.observe.goodput.accounts import PARTS, last_account
from megatron.training.reliability.run_status import parse_events
from tests.apart import read_records
from tests.forked import run_forked, run_program
from tests.tiny import TINY

KEYS = [f"goodput_{part}_seconds" for part in PARTS]

KILLER = """
import os, signal, time
from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback

@CALLBACKS.register("killer")
class Killer(Callback):
    def on_step_end(self, run):
        time.sleep(0.05)
        if run.progress.iteration == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def flags(folder: Path, *more: str) -> list[str]:
    (folder / "killer.py").write_text(KILLER)
    save = str(folder / "save")
    own = f"--log-goodput --log-interval 1 --save-interval 4 --extension {folder / 'killer.py'} --load-or-start"
    return [*TINY.split(), *own.replace("--load-or-start", f"--save {save} --load {save}").split(), *more]


@pytest.fixture(autouse=True)
def every_line_has_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.extensions.observe.goodput.hooks.EVENT_SECONDS", 0.0)


def test_goodput_of_a_killed_and_resumed_run(tmp_path: Path) -> None:
    board = ("--tensorboard-dir", str(tmp_path / "board"))
    more = ("--train-iters", "10", "--eval-iters", "2", "--eval-interval", "2", "--iterations-to-skip", "3", *board)
    began = time.time()
    killed = run_program("pretrain_gpt.py", *flags(tmp_path, *more), KILL_AT="7")
    assert killed.returncode == -signal.SIGKILL
    time.sleep(1)
    done = run_program("pretrain_gpt.py", *flags(tmp_path, *more), code=0)
    wall = time.time() - began
    records = [each for each in read_records(tmp_path / "save/metrics.jsonl") if "goodput" in each]
    assert [each["iteration"] for each in records] == list(range(1, 11))
    for each in records:
        total = sum(each[key] for key in KEYS)
        assert each["goodput"] == pytest.approx(each["goodput_useful_seconds"] / total)
        assert all(each[key] >= 0 for key in KEYS)
    before, after = records[3], records[4]  # the first process trained and saved iteration 4
    assert before["goodput_repeated_seconds"] == before["goodput_idle_seconds"] == 0
    assert after["goodput_repeated_seconds"] >= 0.1  # iterations 5 and 6 are repeated, and iteration 7 was never logged
    assert 1 <= after["goodput_idle_seconds"] < wall
    assert after["goodput_useful_seconds"] >= 4 * 0.05 and after["goodput_skipped_seconds"] > 0
    last = records[-1]
    for part in ("startup", "evaluation", "save", "repeated", "skipped", "idle"):
        assert last[f"goodput_{part}_seconds"] > 0, part
    assert sum(last[key] for key in KEYS) <= wall + 0.1
    step = sum(each["step_time"] for each in records[4:])
    spent = last["goodput_useful_seconds"] - before["goodput_useful_seconds"]
    assert spent == pytest.approx(step, abs=0.05)
    assert done.stdout.count(" goodput ") >= 6 and "idle between starts" in done.stdout
    found = last_account(parse_events((tmp_path / "save/run_events.jsonl").read_text()))
    assert found is not None and found[0] == 10
    assert found[1]["save"] > 0 and found[1]["useful"] == pytest.approx(last["goodput_useful_seconds"], abs=0.01)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [each.step for each in events.Scalars("goodput")] == list(range(1, 11))
    from tools.report import main

    assert main([str(tmp_path / "save"), "--no-plan", "--output", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "over all starts" in page and "idle between starts" in page


def test_a_run_of_two_ranks_logs_the_measurements_of_the_first(tmp_path: Path) -> None:
    own = flags(tmp_path, "--tp", "2", "--exit-interval", "6", "--train-iters", "8")
    run_forked(2, own, tmp_path / "screen")
    run_forked(2, own, tmp_path / "screen")
    records = [each for each in read_records(tmp_path / "save/metrics.jsonl") if "goodput" in each]
    assert [each["iteration"] for each in records] == list(range(1, 9))
    useful = [each["goodput_useful_seconds"] for each in records]
    assert useful == sorted(useful) and useful[0] > 0
    assert records[-1]["goodput_repeated_seconds"] == pytest.approx(0, abs=0.01)
    assert records[-1]["goodput_startup_seconds"] > records[0]["goodput_startup_seconds"] > 0


def test_the_losses_are_the_same_without_goodput(tmp_path: Path) -> None:
    losses = []
    for name, own in (("with", ["--log-goodput"]), ("without", [])):
        file = tmp_path / f"{name}.jsonl"
        run_program("pretrain_gpt.py", *TINY.split(), "--log-interval", "2", "--metrics-file", file, *own, code=0)
        losses.append([each["lm_loss"] for each in read_records(file)])
    assert losses[0] == losses[1]
