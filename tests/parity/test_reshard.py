"""A part of `python -m tests.parity.reshard`: every third layout as source and as target; all pairs by --whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.testing.reshard import Checkpoints, kinds
from tests.parity.dozen import DOZEN, visit
from tests.parity.reshard import LAYOUTS, MODELS, Grid


@pytest.mark.parametrize("family", list(MODELS))
def test_what_one_layout_saves_another_loads(tmp_path: Path, family: str, pytestconfig: pytest.Config) -> None:
    whole = pytestconfig.getoption("--whole")
    names, grid = list(LAYOUTS[family])[:: 1 if whole else 3], Grid(family, tmp_path)
    before: list[str] = []
    for name in names:
        assert grid.visit(name, before, train=True) == {source: [] for source in before}
        before = [name]
    found = kinds(grid.saved[names[0]].truth)
    assert {"weight", "main_param", "exp_avg", "exp_avg_sq"} <= found.keys()
    if family == "muon":
        assert found["exp_avg"] == found["exp_avg_sq"] == found["weight"] - found["momentum_buffer"] > 0
    sources = names if whole else [names[-1]]
    targets = names if whole else names[:1]
    for name in targets:
        assert grid.visit(name, sources, train=False) == {source: [] for source in sources}


def test_strategies_optimizers_and_formats_load_each_other_or_refuse(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """A part of `python -m tests.parity.dozen`: Adam's states into fewer bits, and those of another optimizer."""
    checkpoints, whole = Checkpoints(tmp_path), pytestconfig.getoption("--whole")
    sources = list(DOZEN) if whole else ["adam-dp2-whole", "sgd-tp2"]
    targets = list(DOZEN) if whole else ["adam-fp8-ep2-parameters"]
    for name in sources:
        assert visit(checkpoints, name, [], train=True) == {}
    for name in targets:
        assert visit(checkpoints, name, sources) == {source: [] for source in sources}
    # The remedy of the refusal: weights go on, moments begin anew.
    target = DOZEN["own-dp2-gradients"]
    config = replace(target.config, checkpoint=replace(target.config.checkpoint, load_optim=False))
    wrong = checkpoints.visit("anew", target.world_size, config, ["sgd-tp2"])["sgd-tp2"]
    assert wrong and not [key for key in wrong if key.startswith(("initial weight", "checkpoint"))]
