"""A run that loses ranks, hosts or copies resumes from copies in memory, repeats at most one step, and gives a bitwise
equal result. If copies are missing, the run resumes from the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.extensions.operate.peer_copies.holder import read_header
from megatron.extensions.operate.resilience.save_lease import SaveLease
from tests.extensions.peer_copies.runs import Planned, Run

SHARDED = ("--bf16", "--data-parallel-sharding-strategy", "optim")
"""Flags with which each rank has states that no other rank has."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("whole"), 2, SHARDED)
    said = run.start(flags=["--peer-copy-keep-minutes", "0.001"])  # holders stay nevertheless
    assert "incomplete" not in said
    return run


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Yield a function that creates a run of two ranks on separate hosts."""
    runs = list[Run]()

    def made(*flags: str) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", 2, flags))
        return runs[-1]

    yield made
    for run in runs:
        run.end()


def test_a_killed_rank_costs_no_complete_step(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(*SHARDED)
    said = run.start(Planned("copy", 0, 3))
    assert "start the same command again within 1 minutes: it resumes from copies in memory" in said
    said = run.start(Planned("end", 1, 4))
    assert "loaded checkpoint of iteration 2 from copies in the memory of 2 hosts" in said
    assert not list(run.save.glob("iter_*"))
    said = run.start()
    assert "loaded checkpoint of iteration 4 from copies in the memory of 2 hosts" in said
    run.assert_equal(undisturbed)
    assert not list(run.memory.iterdir())


def test_a_run_recovers_from_a_lost_host_and_from_damaged_memory(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(*SHARDED)
    run.start(Planned("error", 0, 3))
    run.lose(1)
    damage(run.held_by(0), iteration=3, part="1-own")
    damage(run.held_by(0), iteration=2, part="0-own")
    said = run.start(Planned("copied", 0, 1))
    assert "part 1-own at iteration 3 are damaged: trying an older step" in said
    assert "copies in memory are not used: all copies of part 0-own at iteration 2 are damaged" in said
    assert "loaded checkpoint" not in said
    said = run.start(Planned("copied", 1, 2))
    assert "loaded checkpoint of iteration 1 from copies" in said
    damage(run.held_by(0), iteration=2, part="0-own")
    run.lose(1)
    said = run.start()
    assert "copies in memory are not used: all copies of part 0-own" in said
    run.assert_equal(undisturbed)


def test_the_step_before_a_damaged_copy_is_loaded(begin: Callable[..., Run], undisturbed: Run) -> None:
    run = begin(*SHARDED)
    run.start(Planned("error", 0, 3))
    for host in (0, 1):
        damage(run.held_by(host), iteration=3, part="1-own")
    said = run.start()
    assert "part 1-own at iteration 3 are damaged: trying an older step" in said
    assert "loaded checkpoint of iteration 2 from copies in the memory of 2 hosts" in said
    (event,) = run.events("recovery")
    assert event["steps_lost"] == 1 and event["source"] == "copies in memory"
    run.assert_equal(undisturbed)


def damage(folder: Path, iteration: int, part: str) -> None:
    """Flip one bit in a stored copy of the part `part`."""
    for header in folder.glob(f"g*/{part}.[01].json"):
        if read_header(header.with_suffix(""))["iteration"] == iteration:
            data = bytearray(header.with_suffix("").read_bytes())
            data[0] ^= 1
            header.with_suffix("").write_bytes(data)
            return
    raise AssertionError(f"there is no copy of {part} at iteration {iteration}")


def test_a_refused_run_does_not_hide_the_earlier_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    try:
        run.start(Planned("error", 0, 2))
        other = SaveLease(run.save, pytest.fail)
        other.acquire()
        assert "another run saves to" in run.start(code=1)
        other.release()
        run.start()
        (event,) = run.events("recovery")
        assert event["what"].endswith("InjectedError: injected")
    finally:
        run.end()
