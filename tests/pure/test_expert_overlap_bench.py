"""What the benchmark of hidden all-to-alls reads out of a trace."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.moe.dispatcher import WAIT
from tools.bench.expert_overlap import common, shares_of, simulated, union


def test_unions_and_what_they_have_in_common() -> None:
    a = union([(5, 6), (0, 2), (1, 3), (3, 4)])
    assert a == [(0, 4), (5, 6)]
    assert common(a, union([(3, 5.5), (7, 9)])) == 1.5
    assert common(a, []) == 0


def test_an_all_to_all_is_hidden_while_no_pass_waits() -> None:
    def event(name: str, start: float, stop: float, thread: int) -> dict[str, Any]:
        return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": stop - start, "tid": thread}

    found = shares_of(
        {
            "traceEvents": [
                event("FB(stage 1, microbatch 3)", 0, 100, 1),
                event("B(stage 0, microbatch 1)", 10, 90, 2),
                event("SEND_F(stage 1, microbatch 3)", 100, 120, 1),
                event("gloo:all_to_all", 10, 50, 3),
                event("gloo:all_to_all", 40, 60, 4),
                event("gloo:all_reduce", 60, 90, 4),
                event(WAIT, 30, 45, 1),
                event(WAIT, 58, 65, 2),
            ]
        }
    )
    assert (found.exchanging, found.hidden, found.computing, found.span) == (50, 33, 78, 100)
    assert found.share == 0.66


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h2"])
def test_simulated_share(schedule: str) -> None:
    assert simulated(schedule, 8, False, 0.2) == pytest.approx(0)
    assert 0.6 < simulated(schedule, 8, True, 0.2) < 0.8
