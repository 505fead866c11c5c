"""Mutation tests of restarts within the job. Each guarantee is broken on purpose, and at least one test must then
fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.extensions.job_restarts import test_parents, test_restarts, test_roster
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import Mutant, planted
from tests.pure import test_rank_store, test_stop_requests

MUTANTS: dict[str, tuple[str, str, str, Callable[[], object]]] = {
    "a parent that is gone gets a rank": (
        "roster.spares_of",
        "set(living) - set(roster)",
        "set(range(12)) - set(roster)",
        test_roster.test_living_workers_keep_their_ranks_and_no_worker_has_two,
    ),
    "ranks of parents that live move": (
        "roster.replaced",
        "tuple(found)",
        "tuple(sorted(found))",
        test_roster.test_living_workers_keep_their_ranks_and_no_worker_has_two,
    ),
    "ranks of a host are spread over hosts": (
        "roster._best_host",
        "return min(suits, key=lambda host: len(free[host]))",
        "return max(free, key=lambda host: (bool(free[host]), host))",
        lambda: test_roster.test_ranks_of_a_host_stay_together({2, 3}, (0, 1, 6, 7)),
    ),
    "each parent decides for itself": (
        "parents.Parents._propose",
        'self.store.compare_set(f"start/{number}", "", start.to_json())',
        'self.store.set(f"start/{number}", start.to_json())',
        test_parents.test_all_parents_follow_the_first_decision,
    ),
    "parents that are gone are waited for": (
        "parents.Parents._is_gone",
        "return not peer.state()",
        "return False",
        test_parents.test_parents_that_are_gone_are_left_out,
    ),
    "a signal between two starts is forgotten": (
        "signals.ParentSignals.hand_to",
        "if self.first is not None:",
        "if False:",
        test_restarts.test_a_signal_between_two_starts_reaches_the_next_start,
    ),
    "a rank that leaves early has done its work": (
        "restarts.Parent._one_start",
        "if not (_progress[IN_ORDER] or is_failure(code) or code in ENDS):",
        "if False:",
        lambda: test_restarts.test_a_rank_that_exits_early_is_restarted(3),
    ),
    "a start that is asked to stop drops the state in memory": (
        "training.reliability.stop_requests.StopRequests.decide",
        "self._ticks += unsaved",
        "self._ticks += 0",
        test_stop_requests.test_an_unsaved_state_is_saved_before_the_end,
    ),
    "a rank joins the store of another run": (
        "training.reliability.rank_store._check_run",
        "if found != run:",
        "if False:",
        test_rank_store.test_a_rank_that_reaches_the_store_of_another_run_exits,
    ),
}


KILLED = (AssertionError, ExceptionGroup, KeyError, IndexError, pytest.fail.Exception)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, old, new, check = MUTANTS[name]
    monkeypatch.setattr(test_parents.parents, "ROLL", 4.0)
    check()
    where = place if place.startswith("training.") else f"extensions.operate.job_restarts.{place}"
    mutant = Mutant({where: [(old, new)]}, Combination.of())
    with planted(mutant), pytest.raises(KILLED):
        check()
