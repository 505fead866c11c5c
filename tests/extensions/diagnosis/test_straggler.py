"""Tests of the detection of a slow rank. All ranks take the same time per step, because fast ranks wait for the slow
rank. The slow rank is identified nevertheless."""

from __future__ import annotations

import time

import pytest

from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.extensions.observe.diagnosis.straggler import slowest, straggler_line, straggler_record
from megatron.training.config.run_config import RunConfig
from megatron.training.metrics.sinks import Record
from megatron.training.metrics.summary import summarize
from megatron.training.progress import STEP_PARTS, Interval
from megatron.training.train_step import train_step
from tests.dist.test_host_waits import VERDICT, waits
from tests.harness import local_run, run_world
from tests.parity.test_bad_steps import config_of

DELAY = 0.5
"""Delay of the slow rank per micro-batch, in seconds. The delay is much longer than any delay that a busy machine
causes."""


def slow_down(rank: int, world_size: int, config: RunConfig, slow: dict[str, int]) -> Record:
    with local_run(config, rank, world_size) as run:
        (model,) = run.stages.values()
        module = model.decoder.layers[0].mlp
        if rank == slow.get("forward"):
            module.register_forward_hook(lambda *_: time.sleep(DELAY))
        if rank == slow.get("backward"):
            module.register_full_backward_hook(lambda *_: time.sleep(DELAY))
        run.interval = Interval()
        for _ in range(2):
            train_step(run)
        return summarize(run)


@pytest.mark.parametrize("layout", ["--tp 2 --pp 2", "--pp 2 --dp 2"])
def test_a_slow_rank_is_named(layout: str) -> None:
    config = config_of(f"{layout} --micro-batch-size 4 --log-straggler --straggler-minmax-count 2", 4)
    records = run_world(4, slow_down, config, {"forward": 3, "backward": 0})
    for record in records:
        assert record["straggler_forward_rank"] == 3 and record["straggler_backward_rank"] == 0
        assert [len(record[f"straggler_{phase}"]) for phase in STEP_PARTS] == [2] * len(STEP_PARTS)
    assert all(record["straggler_forward"] == records[0]["straggler_forward"] for record in records)


def test_the_slowest_ranks_are_listed() -> None:
    assert slowest([1.0, 4.0, 2.0, 2.0], 2) == [(1, 4.0, 2.0), (2, 2.0, 1.0)]
    assert slowest([0.0, 0.0], 1) == [(0, 0.0, 1.0)]


def test_stragglers_are_recorded_and_printed() -> None:
    table = [[0.2, 2.0, 4.0, 0.1, 0.2], [0.2, 2.0, 4.0, 0.1, 0.2], [0.2, 6.0, 4.0, 0.1, 0.4]]
    record = straggler_record(table, 2, DiagnosisConfig(log_straggler=True, straggler_minmax_count=2))
    assert (record["straggler_forward_rank"], record["straggler_forward_ratio"]) == (2, 3.0)
    assert record["straggler_forward"] == [[2, 3.0, 3.0], [0, 1.0, 1.0]]
    assert record["straggler_optimizer_seconds"] == pytest.approx(0.2)
    (line,) = straggler_line(record, ["a", "a", "b"])
    assert "forward: rank 2 on b 3000.0 ms (x3.00), rank 0 on a 1000.0 ms (x1.00) | backward" in line
    assert straggler_record(table, 0, DiagnosisConfig()) == {} and straggler_line({}, []) == []


def test_comparing_ranks_does_not_wait() -> None:
    assert run_world(1, waits, "--log-straggler") == [VERDICT]
