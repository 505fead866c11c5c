"""Tests of the roster, which assigns ranks to the remaining processes of the launcher after some processes are lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.extensions.operate.job_restarts.roster import Roster, fewer, replaced, spares_of

HOSTS = {worker: f"host{worker // 2}" for worker in range(12)}


@given(st.data())
def test_living_workers_keep_their_ranks_and_no_worker_has_two(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 12))
    host_of = {worker: f"host{data.draw(st.integers(0, 4))}" for worker in range(world)}
    roster = tuple(data.draw(st.permutations(range(world)))[: data.draw(st.integers(1, world))])
    living = data.draw(st.sets(st.integers(0, world - 1)))
    found, lost = replaced(roster, living, host_of), [worker for worker in roster if worker not in living]
    if len(lost) > len(spares_of(roster, living)):
        assert found is None
        return
    assert found is not None and len(set(found)) == len(found) == len(roster) and set(found) <= living
    assert all(new == old for new, old in zip(found, roster, strict=True) if old in living)


@given(st.data())
def test_a_smaller_roster_lists_living_workers_once(data: st.DataObject) -> None:
    living = data.draw(st.sets(st.integers(0, 11), min_size=1))
    roster = tuple(data.draw(st.permutations(range(12)))[:8])
    size = data.draw(st.integers(1, len(living)))
    found = fewer(roster, living, HOSTS, size)
    assert len(found) == len(set(found)) == size and set(found) <= living
    hosts = [HOSTS[worker] for worker in found]
    assert hosts == sorted(hosts, key=hosts.index), "workers of a host are together"


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        # The lost process is replaced by a spare on a host with one spare, not on the host with two spares.
        ({1}, (0, 8, 2, 3)),
        ({2, 3}, (0, 1, 6, 7)),
        ({0, 2, 3}, (8, 1, 6, 7)),
    ],
)
def test_ranks_of_a_host_stay_together(lost: set[int], expected: Roster) -> None:
    living = {0, 1, 2, 3, 6, 7, 8} - lost
    assert replaced((0, 1, 2, 3), living, HOSTS) == expected


def test_a_spare_of_the_same_host_comes_first() -> None:
    host_of = {0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "b"}
    assert replaced((0, 1, 2, 3), {0, 1, 3, 4, 5}, host_of) == (0, 1, 5, 3)


def test_a_smaller_roster_prefers_whole_hosts() -> None:
    assert fewer((0, 1, 2, 3, 4, 5), {0, 2, 3, 4, 5}, HOSTS, 4) == (2, 3, 4, 5)
    assert fewer((0, 1, 2, 3), {0, 1, 2, 4}, HOSTS, 4) == (0, 1, 2, 4)
