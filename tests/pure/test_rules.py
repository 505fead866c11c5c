"""Tests of all configuration rules. Tables in the folder rules/ and in the folders of extensions contain, for each
rule, flags that violate the rule and the expected message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extensions import needs
from tests.rules import Case, check, read_table

TESTS = Path(__file__).parents[1]
CASES = [
    needs(case.extension, case) if case.extension else case
    for path in sorted([*TESTS.glob("pure/rules/*.txt"), *TESTS.glob("extensions/*/rules.txt")])
    for case in read_table(path)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_configuration_rule(case: Case) -> None:
    check(case)
