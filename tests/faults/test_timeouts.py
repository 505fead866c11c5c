"""Ranks that do not come, in each phase of start-up and in steps: named, with the phase and the flag that limits it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.faults.broken_pretrain import slow_down
from tests.faults.runs import MODEL
from tests.forked import forked_ranks, join
from tests.limits import HANG

LIMIT = "0.15"
"""Minutes: much more than the ranks of a busy machine are apart."""

FLAGS = [*MODEL, "--pp", "1", "--startup-timeout-minutes", LIMIT]


def end_of_run(folder: Path, late: int, slow: str) -> str:
    """What is on the screen when the rank that is not `late` has ended."""

    def prepare(rank: int) -> None:
        if rank == late:
            time.sleep(HANG) if slow == "sleep" else slow_down(slow)

    with forked_ranks(2, FLAGS, folder / "screen", prepare) as ranks:
        assert join([ranks[1 - late]]) == [1]
    return (folder / "screen").read_text()


@pytest.mark.parametrize(("slow", "phase"), [("sleep", "start of the ranks"), ("data", "data")])
def test_a_rank_that_is_late_at_start_up_is_named(tmp_path: Path, slow: str, phase: str) -> None:
    text = end_of_run(tmp_path, late=1, slow=slow)
    assert text.count("RUN FAILED") == 1, text
    assert f"did not end {phase} within --startup-timeout-minutes {LIMIT}: 1" in text
    if slow == "data":  # it is there, and says where it is
        assert re.search(r"RUN FAILED: rank 1 of 2 on \S+\nphase: data\n", text), text


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    text = end_of_run(tmp_path, late=0, slow="sleep")
    assert re.search(r"RUN FAILED: rank 1 of 2 on \S+\nphase: start-up\nrank 1 did not find the store", text), text
    assert f"waited for --startup-timeout-minutes {LIMIT}" in text and "Traceback" not in text
