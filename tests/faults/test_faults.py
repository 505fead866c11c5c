"""Tests in which one of several ranks under torchrun fails. All ranks must exit, and the output must end with the root
cause."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from tests.faults.runs import HANGS, Ended, run_with_fault


def root_cause_at(ended: Ended) -> float:
    """Return the time that torchrun prints for the root cause."""
    found = re.search(r"Root Cause \(first observed failure\):\s+\[\d\]:\s+time\s+: (\S+)", ended.screen)
    assert found is not None, ended.screen
    return datetime.fromisoformat(found[1].replace("_", "T")).timestamp()


def test_one_report_ends_the_output(tmp_path: Path) -> None:
    ended = run_with_fault("in_a_forward", tmp_path, "--pp", "1", rank=1, processes=2)
    assert ended.code != 0 and not ended.left
    report = ended.screen[ended.screen.index("RUN FAILED") :]
    assert ended.screen.count("RUN FAILED") == 1
    assert re.search(r"RUN FAILED: rank 1 of 2 on \S+\s+phase: step 3, micro-batch \d+, action F", report)
    assert "RuntimeError: injected: this rank's own error" in report
    assert -2 < root_cause_at(ended) - float((tmp_path / "fault").read_text()) <= ended.seconds
    assert "what to do: " in report
    stacks = sorted(path.name for path in (tmp_path / "save" / "stacks").glob("rank-*"))
    assert stacks == [f"rank-{rank:05d}.txt" for rank in range(2)]
    assert "train_step" in (tmp_path / "save" / "stacks" / "rank-00000.txt").read_text()


def test_a_rank_that_dies_silently_is_named(tmp_path: Path) -> None:
    ended = run_with_fault("kill", tmp_path, "--pp", "1", rank=1, processes=2)
    assert ended.code != 0 and not ended.left
    assert "RUN FAILED: rank 1 of 2" in ended.screen.partition("Root Cause")[2]
    assert "SIGKILL" in ended.screen and "then start the same command again: it " in ended.screen


ERRORS = ("in_a_forward", "exception", "system_exit", "out_of_memory", "no_host_memory", "not_a_number", "data_end")
DEATHS = ("exit_code_3", "segfault", "kill")
ENDS = dict.fromkeys((*ERRORS, *DEATHS, *HANGS), "RUN FAILED: |This configuration cannot run")
ENDS |= dict.fromkeys(("terminate", "user_signal"), "exiting at iteration ")


@pytest.mark.grid("kind", [], list(ENDS))
def test_all_four_ranks_exit_after_any_fault_of_one(kind: str, tmp_path: Path) -> None:
    ended = run_with_fault(kind, tmp_path)
    print(f"{kind}: {ended.seconds:.1f} s from the fault to the end of all processes")
    assert ended.code != 0 and not ended.left, ended.screen
    assert re.search(ENDS[kind], ended.screen), ended.screen
