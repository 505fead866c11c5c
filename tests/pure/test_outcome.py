"""Tests of the status file, which reports the state of a run to scripts, and of the exit code, which reports it to
launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.reliability.launch import Launch
from megatron.training.reliability.run_status import VARIABLE, ExitCode, Outcome, code_for_launcher, early_end_told
from tests.apart import python_apart


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_the_status_file_shows_the_begin_and_the_end_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "outcome"
    outcome = Outcome.from_environment({VARIABLE: str(file)})
    outcome.begin(f"{tmp_path}/a/../b/", f"{tmp_path}/b", write=True)
    folders = [f"save={tmp_path}/b", f"load={tmp_path}/b"]
    assert lines(file) == ["name=RUNNING", "why=", *folders]
    outcome.end(ExitCode.TO_BE_RESUMED, "SIGTERM on\nrank 3")
    assert lines(file) == ["name=TO_BE_RESUMED", "why=SIGTERM on rank 3", *folders]
    outcome.end(ExitCode.KILLED + 15, "a second signal")
    assert lines(file)[0] == "name=KILLED"
    assert list(tmp_path.iterdir()) == [file] and not outcome.asked
    (tmp_path / "outcome.asked").touch()
    assert outcome.asked


def test_ends_are_recorded_as_events(tmp_path: Path) -> None:
    """Events are written to the checkpoint folder even without a status file. If the folder does not exist yet, no
    event is written."""
    save = tmp_path / "save"
    for code in (ExitCode.FAILED, ExitCode.TO_BE_RESUMED, ExitCode.KILLED + 9):
        outcome = Outcome.from_environment({})
        outcome.begin(str(save), None, write=False)
        outcome.end(code, "rank 5\nof 8")
        save.mkdir(exist_ok=True)
    events = [json.loads(line) for line in (save / "run_events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["name"]) for event in events] == [("end", "TO_BE_RESUMED"), ("end", "KILLED")]
    assert events[0]["why"] == "rank 5 of 8"


def test_only_one_rank_reports_running_and_any_rank_may_report_the_end(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path / "outcome")
    outcome.begin("save", None, write=False)
    assert not list(tmp_path.iterdir())
    outcome.end(ExitCode.FAILED, "rank 5 of 8")
    assert lines(tmp_path / "outcome") == ["name=FAILED", "why=rank 5 of 8", f"save={Path('save').resolve()}", "load="]


def test_the_status_file_is_optional_and_its_errors_do_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome.from_environment({})
    outcome.begin("save", "load", write=True)
    outcome.end(ExitCode.DONE)
    assert outcome.file is None
    Outcome(tmp_path / "missing" / "outcome").end(ExitCode.DONE)
    assert "cannot write OUTCOME_FILE" in capsys.readouterr().out


@pytest.mark.parametrize(("local_rank", "code", "name"), [(0, 2, "BAD_CONFIGURATION"), (0, 0, "DONE"), (1, 2, None)])
def test_an_early_exit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int, code: int, name: str | None
) -> None:
    file = tmp_path / "outcome"
    monkeypatch.setenv(VARIABLE, str(file))
    # A rank on the second host writes the status file as well.
    with pytest.raises(SystemExit), early_end_told(Launch(2 + local_rank, 4, local_rank)):
        raise SystemExit(code)
    assert (lines(file)[0] if file.exists() else None) == (name and f"name={name}")


@pytest.mark.parametrize(
    ("code", "environ", "expected"),
    [
        (75, {}, 75),
        (75, {VARIABLE: "file"}, 0),
        (75, {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"}, 0),
        (75, {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "1"}, 75),
        (1, {VARIABLE: "file"}, 1),
        (2, {VARIABLE: "file"}, 2),
        (143, {VARIABLE: "file"}, 143),
    ],
)
def test_the_exit_code_for_launchers(code: int, environ: dict[str, str], expected: int) -> None:
    assert code_for_launcher(code, environ) == expected


HELD = """
import os, signal
from megatron.training.reliability.launch import SIGNALS, hold_ignored_signals
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
hold_ignored_signals()
os.kill(os.getpid(), signal.SIGUSR1)
seen = []
for number in SIGNALS:
    signal.signal(number, lambda number, frame: seen.append(number))
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "as it was not ignored"
assert not seen
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
assert seen == [signal.SIGUSR1], seen
"""


def test_early_signals_are_held_if_they_were_ignored() -> None:
    python_apart("-c", HELD, code=0)
