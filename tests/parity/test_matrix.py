"""A part of the parity matrix that fits every change, and the proof that it can fail.

The whole: --whole, or `python -m tests.parity.matrix` and `python -m tests.parity.mutants` for a line each.
"""

from __future__ import annotations

import pytest

from tests.parity.matrix import difference, whole_matrix
from tests.parity.matrix.combination import FACTORS, Combination
from tests.parity.matrix.named import NAMED
from tests.parity.matrix.pairwise import legal, pairs_of, pairwise
from tests.parity.mutants import MUTANTS, seen

EVERY = 20


@pytest.mark.grid("name", list(NAMED)[::4], list(NAMED))
def test_named_combination_computes_what_one_process_does(name: str) -> None:
    assert difference(NAMED[name]) is None


@pytest.mark.grid("combination", pairwise()[::EVERY], pairwise())
def test_combination_computes_what_one_process_does(combination: Combination) -> None:
    assert difference(combination) is None


@pytest.mark.grid("name", list(MUTANTS)[::8], list(MUTANTS))
def test_matrix_notices_a_broken_reduction(name: str) -> None:
    assert seen(name, MUTANTS[name][1][0]) is not None


def test_matrix_covers_every_choice_and_is_legal() -> None:
    chosen = whole_matrix()
    assert all(legal(combination) for combination in chosen)
    for factor, options in FACTORS.items():
        assert {combination[factor] for combination in chosen} == set(options), factor
    covered = set().union(*(pairs_of(combination) for combination in chosen))
    assert (("tp", "4sp"), ("mlp", "moe")) in covered
    assert {(("pp", "2"), ("heads", "mqa")), (("heads", "mqa"), ("mlp", "moe"))} <= covered
    assert (("schedule", "zb-v"), ("cp", "2ulysses")) in covered
    assert (("cp", "4ring"), ("optimizer", "overlapped")) in covered
    assert (("optimizer", "overlapped"), ("update", "muon")) in covered
