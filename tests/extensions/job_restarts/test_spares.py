"""Tests of runs that lose ranks together with the ranks' processes. Spare ranks take over the work of the lost ranks,
and the resulting weights are bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron.extensions.operate.job_restarts import restarts
from megatron.extensions.operate.job_restarts.layouts import Choice
from megatron.extensions.operate.peer_copies.hooks import PeerCopies
from megatron.extensions.plan.planner.suggest.space import Family, Layout, Pipeline
from tests.extensions.peer_copies.runs import Planned, Run, lost_little

SHARDED = ["--data-parallel-sharding-strategy", "optim", "--train-iters", "5"]
FLAGS = ["--bf16", *SHARDED, "--global-batch-size", "4"]
WIDE = ["--fp64", *SHARDED, "--tp", "2", "--global-batch-size", "12"]
IN_JOB = ["--restarts-in-job", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("whole"), 2, FLAGS)
    run.start()
    return run


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield a function that creates a run with spare ranks."""
    runs = list[Run]()

    def made(processes: int, spares: int, flags: Sequence[str] = FLAGS, per_host: int = 1) -> Run:
        again = [*flags, *IN_JOB, "--spare-ranks", str(spares)]
        runs.append(Run(tmp_path / f"run{len(runs)}", processes, again, per_host))
        return runs[-1]

    yield made
    for run in runs:
        run.end()


def test_a_spare_takes_the_place_of_a_lost_rank(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(3, 1)
    said = run.start(Planned("host 1", 0, 2))
    assert "the ranks cannot restart in the same processes: the parents of ranks 1 are lost" in said
    assert "rank 1 now runs in spare process 2 of the launcher" in said
    run.assert_equal(undisturbed)
    (event,) = run.events("recovery")
    assert (event["rung"], event["source"]) == ("spare ranks in the job", "copies in memory")
    assert lost_little(event, said), said


def test_a_parent_records_a_failure_that_its_rank_did_not_record(
    begin: Callable[..., Run], undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a rank may exit before it has recorded the failure that makes it exit."""
    monkeypatch.setattr(PeerCopies, "_note_fault", lambda self: None)
    run = begin(3, 1)
    run.start(Planned("host 1", 0, 2))
    run.assert_equal(undisturbed)
    (event,) = run.events("recovery")
    assert (event["rung"], event["source"]) == ("spare ranks in the job", "copies in memory")


def test_spares_may_die_before_and_while_they_are_needed(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(5, 3)
    gone = Planned("workers 3", 0, 1)  # while it waits
    run.start(gone, Planned("host 1", 0, 2), Planned("start workers 2", 2, 0, start=1))
    run.assert_equal(undisturbed)
    assert {event["rung"] for event in run.events("recovery")} == {"spare ranks in the job"}


def test_a_host_of_several_ranks_is_replaced_by_a_host_of_spares(begin: Callable[..., Run], tmp_path: Path) -> None:
    flags = [*FLAGS, "--tp", "2"]
    whole = Run(tmp_path / "whole", 4, flags, per_host=2)
    whole.start()
    run = begin(6, 2, flags, per_host=2)
    said = run.start(Planned("host 1", 0, 3))
    assert "rank 2 now runs in spare process 4" in said and "rank 3 now runs in spare process 5" in said
    run.assert_equal(whole)


def test_without_spares_fewer_ranks_continue_under_another_layout(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_stages = Layout(Family(), Pipeline(ranks=2))
    monkeypatch.setattr(restarts, "smaller_layout", lambda config, ranks, device: Choice(1.0, 2, two_stages))
    whole = Run(tmp_path / "whole", 4, WIDE)
    whole.start()
    run = begin(5, 1, WIDE)
    said = run.start(Planned("workers 4", 0, 1), Planned("host 3", 0, 2))
    assert "there are too few spares: 1 needed, 0 available" in said
    assert " 2 ranks continue with --tensor-model-parallel-size 1" in said
    run.assert_close(whole, 1e-9)
    (event,) = run.events("recovery")
    # The in-memory checkpoint copies include the copies on the idle host.
    assert (event["rung"], event["source"]) == ("another layout in the job", "copies in memory")
    assert lost_little(event, said), said


def test_without_the_store_the_launcher_resumes_from_copies_in_memory(tmp_path: Path) -> None:
    flags = ["--fp64", *SHARDED, "--global-batch-size", "12"]
    whole, run = Run(tmp_path / "whole", 3, flags), Run(tmp_path / "run", 3, [*flags, *IN_JOB])
    whole.start()
    with pytest.raises(AssertionError, match="not started again in the job: the store of the ranks does not answer"):
        run.start(Planned("host 0", 1, 3))
    begin_at_host(run, 1)
    said = run.start(ranks=2)
    run.end()
    assert "recovered by restart by the launcher from copies in memory" in said
    run.assert_close(whole, 1e-9)


def begin_at_host(run: Run, first: int) -> None:
    """From the next start of the run on, place the ranks on consecutive hosts, beginning with host number `first`."""
    prepare = run._prepare
    run._prepare = lambda rank: prepare(rank + first)  # type: ignore[method-assign]


def test_more_spares_than_processes_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 2, [*IN_JOB, "--spare-ranks", "2"])
    with pytest.raises(AssertionError, match="--spare-ranks 2: must be below 2"):
        run.start()
