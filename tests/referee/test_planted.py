"""The referee names the cause of a planted fault. `python -m tests.referee.planted` tests all faults."""

from __future__ import annotations

import re

from tests.parity.mutants import MUTANTS
from tests.referee.planted import EXPECTED, Found, summary, verdict_of

FAULT = "Sinks get no gradient"


def test_a_planted_fault_is_attributed() -> None:
    found = verdict_of(FAULT)
    assert found == ("right", "decoder.layers.5.self_attention.core.softmax_offset", "is zero", True)
    assert "| name the gradient that the fault spoils first | 1 |" in summary([found, Found("lost", "")])


def test_every_expectation_belongs_to_a_mutant() -> None:
    assert FAULT in EXPECTED.keys() & MUTANTS.keys()
    for pattern in EXPECTED.values():
        re.compile(pattern)
