"""Tests that run the parity matrix. The core test suite covers most choices. Campaigns run further combinations, and
run mutants to show that the matrix detects errors.

--whole runs the whole matrix. `python -m tests.parity.matrix` and `python -m tests.parity.mutants` also run the whole
matrix and all mutants, and print one line for each combination or mutant.
"""

from __future__ import annotations

import pytest

from tests.apart import python_apart
from tests.parity.matrix import difference, every_choice, many_pairs, whole_matrix
from tests.parity.matrix.combination import FACTORS, Combination
from tests.parity.matrix.design import all_pairs, faults, illegal_pairs, pairs_of, pairwise
from tests.parity.matrix.named import NAMED
from tests.parity.mutants import MUTANTS, edited, function_of, seen

FEW = 7
"""Number of combinations from `every_choice` that the core test suite runs. These combinations have few ranks and
contain most choices."""

MORE = 18
"""Number of additional combinations that campaigns run. These combinations contain three fifths of all pairs of
choices. With --whole, every pair is covered."""


@pytest.mark.parametrize("combination", every_choice()[:FEW], ids=str)
def test_many_choices_compute_the_same_as_one_process(combination: Combination) -> None:
    assert difference(combination) is None


@pytest.mark.grid("name", list(NAMED)[::3], list(NAMED))
def test_named_combination_computes_the_same_as_one_process(name: str) -> None:
    assert difference(NAMED[name]) is None


@pytest.mark.grid("combination", [*every_choice()[FEW:], *many_pairs(MORE)], pairwise())
def test_combination_computes_the_same_as_one_process(combination: Combination) -> None:
    assert difference(combination) is None


@pytest.mark.grid("name", list(MUTANTS)[::12], list(MUTANTS))
def test_the_matrix_detects_a_broken_reduction(name: str) -> None:
    assert seen(name, MUTANTS[name].combination) is not None


def test_every_mutant_matches_the_source() -> None:
    for mutant in MUTANTS.values():
        for path, edits in mutant.edits.items():
            edited(function_of(path)[1], edits)


def test_every_pair_occurs_in_a_combination_or_is_listed_as_invalid() -> None:
    """If this test fails after a choice or a rule has been added, run `python -m tests.parity.matrix --design`."""
    for combination in (*pairwise(), *NAMED.values()):
        assert not faults(combination), combination
    covered = set().union(*map(pairs_of, pairwise()))
    assert set(all_pairs()) == covered ^ illegal_pairs()


def test_every_choice_is_covered() -> None:
    covered = {choice for combination in (*every_choice(), Combination.of()) for choice in combination.items}
    assert covered == {(name, choice) for name, options in FACTORS.items() for choice in options}


def test_the_command_lists_every_choice() -> None:
    """The list must include the choices of extensions. The test starts a new process, in which no extensions have been
    loaded yet."""
    listed = python_apart("-m", "tests.parity.matrix", "--list", code=0).stdout.splitlines()
    assert [line.split(" ", 1)[1] for line in map(str.strip, listed)] == [str(each) for each in whole_matrix()]
