"""Every rule of a configuration: what breaks it, and what is said about it. The tables are in the folder rules/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extensions import needs
from tests.rules import Case, check, read_table

CASES = [
    needs(case.extension, case) if case.extension else case
    for path in sorted((Path(__file__).parent / "rules").glob("*.txt"))
    for case in read_table(path)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case)
