"""Training on two hosts equals one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.forked import run_on_hosts
from tests.cluster.hosts import hosts, missing
from tests.forked import run_forked
from tests.tiny import TINY

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MODEL = f"{TINY} --fp64 --lr 1e-3 --global-batch-size 8 --log-interval 1 --hidden-dropout 0.1".split()


def trained(folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["lm_loss"] for record in records], [record["grad_norm"] for record in records]


@pytest.mark.grid("start", ["forked"], ["forked", "torchrun"])
def test_training_on_two_hosts_equals_one_process(start: str, tmp_path: Path) -> None:
    flags = [*MODEL, "--tp", "2", "--pp", "2", "--save", str(tmp_path / "hosts")]
    with hosts(2, "100mbit") as box:
        if start == "forked":
            run_on_hosts(box, 2, flags, tmp_path)
        else:
            for launcher in box.torchrun(2, "pretrain_gpt.py", *flags, log=tmp_path):
                assert launcher.wait() == 0, launcher.screen
    run_forked(1, [*MODEL, "--save", str(tmp_path / "one")], tmp_path / "screen")
    alone, together = trained(tmp_path / "one"), trained(tmp_path / "hosts")
    assert len(alone[0]) == 4
    assert together[0] == pytest.approx(alone[0], rel=1e-9) and together[1] == pytest.approx(alone[1], rel=1e-9)
