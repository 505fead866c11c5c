"""Tests of the lines that a dry run prints about copies of the training state in memory."""

from __future__ import annotations

import pytest

from megatron.extensions.operate.peer_copies.plan_lines import goodput_line, lines
from megatron.extensions.plan.planner.failures.expected import Expected, SaveCost
from megatron.extensions.plan.planner.flags import PlannedRun
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.tiny import TINY

COMMON = f"{TINY} --global-batch-size 8 --save runs/a --load runs/a --peer-copies 1"


def planned(flags: str, world_size: int, ranks_per_node: int) -> str:
    config = resolve_legal(parse_args(f"{COMMON} {flags}".split()), world_size)
    return "\n".join(lines(PlannedRun(config, world_size, ranks_per_node, 0.5, None)))


@pytest.mark.parametrize("strategy", ["optim", "no_shard"])
def test_plan_for_four_hosts(strategy: str) -> None:
    said = planned(f"--bf16 --data-parallel-sharding-strategy {strategy} --peer-copy-bandwidth 1", 8, 2)
    assert "4 hosts of 2 ranks, 1 copy of each part on other hosts\nsurvive any lost host, and " in said
    if strategy == "optim":
        assert "66.7% of the sets of 2" in said
        assert "a host sends for" in said and "MB/s (--peer-copy-bandwidth 1), " in said
    else:
        assert "a rank sends for each copy: 0" in said and "a host sends" not in said


def test_goodput_with_copies() -> None:
    """A step takes 5 s, a save takes 60 s, and copies take no time. A failure happens every hour, and a restart takes
    100 s."""
    said = goodput_line(Expected(5, 3600, 100, SaveCost(0, 60, "")), 1, 0.0, 0.0)
    assert "lost to copies 0.00%, to restarts 2.74%, to repeated steps 0.07%;" in said
    assert said.startswith("goodput 97.19% ") and "at the best --save-interval: 94.86%" in said


def test_plan_for_one_host() -> None:
    said = planned("", 2, 2)
    assert "1 host of 2 ranks, 0 copies" in said and "because there are no more hosts" in said
    assert "survive the failure of ranks, but not the loss of a host" in said
