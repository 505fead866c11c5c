"""A part of `python -m tests.parity.reshard`: every layout once as source and once as target; all pairs by --whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.testing.reshard import kinds
from tests.parity.reshard import LAYOUTS, MODELS, Grid


@pytest.mark.parametrize("family", list(MODELS))
def test_what_one_layout_saves_another_loads(tmp_path: Path, family: str, pytestconfig: pytest.Config) -> None:
    names, grid = list(LAYOUTS[family]), Grid(family, tmp_path)
    before: list[str] = []
    for name in names:
        assert grid.visit(name, before, train=True) == {source: [] for source in before}
        before = [name]
    found = kinds(grid.saved[names[0]].truth)
    assert {"weight", "main_param", "exp_avg", "exp_avg_sq"} <= found.keys()
    if family == "muon":
        assert found["exp_avg"] == found["exp_avg_sq"] == found["weight"] - found["momentum_buffer"] > 0
    sources = names if pytestconfig.getoption("--whole") else [names[-1]]
    targets = names if pytestconfig.getoption("--whole") else names[:1]
    for name in targets:
        assert grid.visit(name, sources, train=False) == {source: [] for source in sources}
