"""The comparison of predicted and measured steps: its layouts can run, its verdict says what rows show, and ranks have
the share of a core that it gives them."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path

import pytest

from megatron.training.config.arguments import command_line
from megatron.training.config.prepare import prepare
from megatron.training.reliability.launch import Launch
from tests.cluster.cpu_shares import cpu_shares, join
from tests.cluster.predicted import HOSTS, LAYOUTS, RANKS, Row, flags_of, verdict


def test_every_layout_can_run_and_differs_from_the_others() -> None:
    launch = Launch(0, HOSTS * RANKS)
    configs = [prepare(command_line(flags_of(layout, 4), launch), launch) for layout in LAYOUTS]
    assert len({(config.parallel, config.ddp, config.optimizer) for config in configs}) == len(LAYOUTS) >= 14


def test_the_verdict_is_of_the_rows() -> None:
    times = {"dp4": (1.0, 1.25), "tp2-pp2": (1.1, 1.0), "tp4": (3.0, 2.0), "pp4": (2.2, 2.0)}
    rows = [Row("1gbit", layout, predicted, measured, {}) for layout, (predicted, measured) in times.items()]
    assert [round(row.error, 3) for row in rows] == [-0.2, 0.1, 0.5, 0.1]
    assert verdict(rows) == [
        "median error 15 %, largest 50 %",
        "best measured layout: tp2-pp2, number 2 of the predicted (dp4, tp2-pp2, pp4, ...)",
        "TP inside a host and PP across, beside TP across: 2.00 times as fast (2.73 predicted)",
    ]


def _joined(group: Path, said: mp.connection.Connection) -> None:
    join(group)
    said.send(Path("/proc/self/cgroup").read_text())


def test_a_process_joins_a_share_of_a_core() -> None:
    with cpu_shares(2, 0.25) as groups:
        if not groups:
            pytest.skip("no control groups for processor time can be made here")
        receive, said = mp.Pipe(duplex=False)
        process = mp.get_context("fork").Process(target=_joined, args=(groups[1], said))
        process.start()
        assert f"box-{os.getpid()}-1" in receive.recv()
        process.join()
    assert not any(group.exists() for group in groups)
