"""The short form of `python -m tests.faults.index_races`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.faults.index_races import PARTS


@pytest.mark.parametrize("part", PARTS)
def test_processes_race_for_index_files(part: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's, which other users may not enter
        assert PARTS[part](Path(folder), 2, 8)
