"""tools/bench/head_memory.py predicts and measures the memory that the output layer and the loss need."""

from __future__ import annotations

import json
from pathlib import Path

from tests.apart import python_apart


def test_the_plan_equals_the_growth_of_a_process(tmp_path: Path) -> None:
    sizes = "--vocab 16384 --tokens 256 --chunks 0".split()
    done = python_apart("tools/bench/head_memory.py", *sizes, "--json", str(tmp_path / "head.json"), code=0)
    assert done.stdout.splitlines()[1].split()[:2] == ["16,384", "all"]
    (row,) = json.loads((tmp_path / "head.json").read_text())["rows"]
    assert 0.9 * row["planned"] < row["measured"] < row["planned"] + 8 * 2**20
