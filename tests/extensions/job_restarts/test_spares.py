"""Runs whose ranks are lost with their processes: spares take their places, and the end is bitwise the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.extensions.peer_copies.runs import Planned, Run

FLAGS = ["--bf16", "--data-parallel-sharding-strategy", "optim", "--global-batch-size", "4", "--train-iters", "5"]
IN_JOB = ["--restarts-in-job", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("whole"), 2, FLAGS)
    run.start()
    return run


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run with spares."""
    runs = list[Run]()

    def made(processes: int, spares: int, *flags: str, per_host: int = 1) -> Run:
        again = [*FLAGS, *IN_JOB, "--spare-ranks", str(spares), *flags]
        runs.append(Run(tmp_path / f"run{len(runs)}", processes, again, per_host))
        return runs[-1]

    yield made
    for run in runs:
        run.end()


def test_a_spare_takes_the_place_of_a_lost_rank(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(3, 1)
    said = run.start(Planned("host 1", 0, 2))
    assert "no start of the same ranks: the processes of 1 are gone" in said
    assert "rank 1 is now process 2 of the launcher, a spare" in said
    run.assert_equal(undisturbed)
    (event,) = run.events("recovery")
    assert (event["rung"], event["source"]) == ("spare ranks in the job", "copies in memory")
    assert event["steps_lost"] <= 1


def test_spares_that_die_before_and_while_they_are_needed(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(5, 3)
    gone = Planned("workers 3", 0, 1)  # while it waits
    run.start(gone, Planned("host 1", 0, 2), Planned("start workers 2", 2, 0, start=1))
    run.assert_equal(undisturbed)
    assert {event["rung"] for event in run.events("recovery")} == {"spare ranks in the job"}


def test_a_host_of_several_ranks_is_replaced_by_a_host_of_spares(begin: Callable[..., Run], tmp_path: Path) -> None:
    flags = [*FLAGS, "--tp", "2"]
    whole = Run(tmp_path / "whole", 4, flags, per_host=2)
    whole.start()
    run = begin(6, 2, "--tp", "2", per_host=2)
    said = run.start(Planned("host 1", 0, 3))
    assert "rank 2 is now process 4" in said and "rank 3 is now process 5" in said
    run.assert_equal(whole)


def test_without_a_spare_left_the_launcher_decides(begin: Callable[..., Run]) -> None:
    run = begin(3, 1)
    with pytest.raises(AssertionError, match="no spares take their place: 1 are needed, and 0 wait"):
        run.start(Planned("workers 2", 0, 1), Planned("workers 1", 0, 2))


def test_more_spares_than_processes_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 2, [*IN_JOB, "--spare-ranks", "2"])
    with pytest.raises(AssertionError, match="--spare-ranks 2: must be below 2"):
        run.start()
