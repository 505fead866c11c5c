"""Tests of tools/bench/micro.py without a GPU. In one test, a part of the benchmark fails. In another, the process of a
part can no longer use the device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import device_time, micro

TRIAL = ["--cpu", "--config", "tiny", "--calls", "1", "--rounds", "2", "--only", "memory", "GEMM fp8"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_part_keeps_its_error_and_the_others_continue(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, timed, tried = tmp_path / "found.json", micro.timed, list[str]()

    def failing(part: micro.Part, *more: Any) -> micro.Row:
        tried.append(part.name)
        if len(tried) == 2:
            return micro.Row(part.group, part.name, None, part.tflop, part.gigabytes, "an illegal address")
        return timed(part, *more)

    monkeypatch.setattr(micro, "timed", failing)
    monkeypatch.setattr(micro, "is_lost", lambda device: lost)
    assert micro.main([*TRIAL, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    every = [part.name for part in micro.parts_of(micro.config_of(micro.SHAPES["tiny"], 1, 1, "--bf16 --cpu"))]
    assert [row["name"] for row in rows] == [name for name in every if name in {row["name"] for row in rows}]
    assert len(rows) == len({(row["group"], row["name"]) for row in rows}) > 4
    assert rows[1]["failed"] == "an illegal address" and rows[0]["milliseconds"] and rows[-1]["milliseconds"]
    assert len(tried) == (2 if lost else len(rows))
    assert ("another process continues" in capfd.readouterr().out) == lost


class Device:
    """Simulated clock of a GPU: launching a call takes 3 ms on the host, and the call itself takes 1 ms."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(Device.now, time.perf_counter())

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Device.Event) -> float:
            return 1e3 * (end.at - self.at)

    @classmethod
    def run(cls, seconds: float) -> None:
        cls.now = max(cls.now, time.perf_counter()) + seconds


def test_a_busy_device_is_timed_without_launch_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Device.Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: Device.run(cycles / 2e9))
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def call() -> None:
        clock[0] += 0.003
        Device.run(0.001)

    took, started = device_time.one_round(call, 10, 0.003, torch.device("cuda"))
    assert took == pytest.approx(1.0) and started == pytest.approx(3.0)
