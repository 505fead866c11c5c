"""The referee attributes planted faults: one here, all by `python -m tests.referee.planted`."""

from __future__ import annotations

import re

from tests.parity.mutants import MUTANTS
from tests.referee.planted import EXPECTED, verdict_of

FAULT = "Sinks get no gradient"


def test_a_planted_fault_is_attributed() -> None:
    verdict, said = verdict_of(FAULT)
    assert verdict == "right" and re.fullmatch(r"decoder\.layers\.5\..*softmax_offset is zero", said), said


def test_every_expectation_is_of_a_mutant() -> None:
    assert FAULT in EXPECTED.keys() & MUTANTS.keys()
    for pattern in EXPECTED.values():
        re.compile(pattern)
