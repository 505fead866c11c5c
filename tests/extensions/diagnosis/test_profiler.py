"""Tests of torch profiler traces. A trace contains only the requested steps and ranks."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.extensions.observe.diagnosis.profiler import Profiler
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.harness import run_world, train_to_the_end
from tests.tiny import TINY

RUN = f"{TINY} --log-interval 1 --profile --profile-step-start 1 "


def profiled(rank: int, size: int, flags: str, folder: str) -> None:
    train_to_the_end(rank, size, [*flags.split(), "--metrics-file", f"{folder}/metrics", "--tensorboard-dir", folder])


def events_of(trace: Path) -> tuple[int, list[dict[str, Any]]]:
    """Read a trace file, and return two values: the number of optimizer steps in the trace, and all events of the
    trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step") for event in events), events


def test_profiles_cover_the_requested_steps_and_ranks(tmp_path: Path) -> None:
    run_world(2, profiled, RUN + "--profile-step-end 3 --profile-ranks 1", str(tmp_path))
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-1.json"]
    updates, events = events_of(tmp_path / "profile" / "rank-1.json")
    assert updates == 2
    assert not any("Input Dims" in event.get("args", {}) or event.get("cat") == "python_function" for event in events)


def test_a_run_that_ends_within_its_profile_writes_it(tmp_path: Path) -> None:
    """The trace of such a run includes pipeline actions, and the shapes and stacks of torch operations."""
    more = "--profile-step-end 30 --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"
    run_world(1, profiled, RUN + more, str(tmp_path))
    updates, events = events_of(tmp_path / "profile" / "rank-0.json")
    assert updates == 3
    assert "F(stage 0, microbatch 0)" in {event["name"] for event in events}
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("cat") == "python_function" for event in events)


def test_nsys_ranges_and_memory_snapshots_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces functions of torch.cuda and records the calls that a run would make on a GPU."""
    calls: list[str] = []

    class Ranges(AbstractContextManager):
        def __init__(self, record_shapes: bool) -> None:
            calls.append(f"ranges {record_shapes}")

        def __exit__(self, *_: object) -> None:
            calls.append("no ranges")

    runtime = SimpleNamespace(cudaProfilerStart=lambda: "start", cudaProfilerStop=lambda: "stop")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", calls.append)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda: calls.append("history"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    observers: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr("megatron.extensions.observe.diagnosis.profiler.emit_nvtx", Ranges)
    flags = RUN + "--profile-step-end 3 --record-shapes --record-memory-history --memory-snapshot-path m"
    profiler = Profiler(resolve(parse_args(flags.split()), 1))
    device = SimpleNamespace(device=torch.device("cuda"))
    run: Any = SimpleNamespace(optimizer=SimpleNamespace(ddp=device), progress=SimpleNamespace(iteration=0))
    profiler.on_start(run)
    for run.progress.iteration in range(1, 5):
        calls.append(f"after {run.progress.iteration}")
        profiler.on_step_end(run)
    observers[0]("out of memory, after it was written")
    profiler.on_end(run)
    steps = ["history", "after 1", "start", "ranges True", "after 2", "after 3", "stop", "no ranges", "m.rank0"]
    assert calls == [*steps, "after 4"]
