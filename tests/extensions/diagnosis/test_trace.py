"""Tests of traces that cover all ranks: the recorded events, and the common clock of all ranks. Tracing must not affect
the steps that are not traced."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.torch_private import default_store
from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import RankTrace, assemble, measured_steps
from megatron.extensions.observe.diagnosis.trace.recorder import Recorder
from megatron.extensions.observe.diagnosis.trace.trace_file import Event, Trace, read_trace
from megatron.extensions.observe.diagnosis.trace.tracer import Alignment, Offset, measure
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.tasks import start_run
from megatron.training.training import train
from tests.extensions.diagnosis.trace_cases import problems
from tests.harness import run_world
from tests.tiny import TINY

RUN = f"{TINY} --num-layers 4 --vocab-size 64 --log-interval 1 --micro-batch-size 1 "
TRACE = "--trace --trace-step-start 1 --trace-step-end 3 "


def run_of(rank: int, size: int, flags: str, folder: str) -> tuple[TrainingRun, list[str]]:
    """Complete a training run, and return the run and its output."""
    files = f"--metrics-file {folder}/metrics --tensorboard-dir {folder}"
    config = resolve_legal(parse_args(f"{flags} {files}".split()), size)
    said: list[str] = []
    with local_run(config, rank, size) as run, ExitStack() as resources:
        run.say = said.append
        start_run(run, resources)
        train(run)
    return run, said


def traced(rank: int, size: int, flags: str, folder: str) -> tuple[float, bool]:
    """Train, and return two values: the last loss, and True if torch.distributed and the executor are unchanged
    afterwards."""
    functions = dist.all_reduce, dist.isend, dist.all_to_all_single, dist.Work.wait
    run, _ = run_of(rank, size, flags, folder)
    as_before = not run.pipeline.executor.watchers and not run.timers.watchers
    after = dist.all_reduce, dist.isend, dist.all_to_all_single, dist.Work.wait
    return run.measured["lm_loss"], as_before and functions == after


def traced_lines(rank: int, size: int, flags: str, folder: str) -> list[str]:
    """Train with tracing, and return the printed lines that mention the trace."""
    return [line for line in run_of(rank, size, flags, folder)[1] if "trace" in line]


def slices(trace: Trace, category: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def test_a_trace_of_four_ranks(tmp_path: Path) -> None:
    flags = RUN + "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --pipeline-schedule zb-h1 "
    found = run_world(4, traced, flags + "--train-iters 3 " + TRACE, str(tmp_path))
    assert all(as_before for _, as_before in found)
    trace = read_trace(tmp_path / "trace" / "iterations-2-3.json.gz")
    assert problems(trace) == []
    other = trace["otherData"]
    assert [facts["coords"] for facts in other["ranks"]] == [{"tp": t, "pp": p} for p in (0, 1) for t in (0, 1)]
    kinds = {"F", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    assert kinds == {event["args"]["kind"] for event in slices(trace, "pipeline")}
    steps = measured_steps(trace)
    assert [(step.iteration, step.ranks) for step in steps] == [(i, r) for i in (2, 3) for r in ((0, 2), (1, 3))]
    assert all(step.microbatches == 4 and 0 < step.bubble < 1 for step in steps)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step 2", "step 3", "data", "optimizer", "end of the gradient reduction", "send pp"} <= names
    assert any(name.startswith(("all-reduce tp", "all-to-all tp")) for name in names)
    planned = slices(trace, "planned")
    compute = [event for event in slices(trace, "pipeline") if event["args"]["kind"] in "FBIW"]
    assert len(planned) == len(compute)
    assert other["pipeline"]["planned_us"] > 0 and 0 < other["pipeline"]["planned_bubble"] < 1
    sends = [event for event in slices(trace, "pipeline") if event["args"]["kind"].startswith("SEND")]
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == len(sends)


def test_collectives_have_axes_and_purposes_and_steps_have_phases(tmp_path: Path) -> None:
    flags = RUN + "--use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    flags += f"--context-parallel-size 2 --save {tmp_path}/save --save-interval 2 --eval-iters 1 --eval-interval 2 "
    run_world(4, traced, flags + "--num-layers 2 " + TRACE, str(tmp_path))
    trace = read_trace(tmp_path / "trace" / "iterations-2-3.json.gz")
    assert problems(trace) == []
    names = {event["name"] for event in trace["traceEvents"]}
    wanted = {"parameter gather", "gradient reduction", "token count"}
    assert wanted <= {name.partition(": ")[2] for name in names}, names
    communication = [event for event in trace["traceEvents"] if event.get("cat") == "communication"]
    axes = {event["args"]["axis"] for event in communication if "args" in event}
    assert {"ep", "cp"} <= axes
    assert {"save", "evaluation batch"} <= names
    evaluated = [event for event in slices(trace, "pipeline") if "iteration" not in event["args"]]
    assert evaluated and measured_steps(trace)[0].microbatches == 2


def test_a_run_that_ends_within_its_trace_writes_it(tmp_path: Path) -> None:
    ((losses, _),) = run_world(1, traced, RUN + "--trace --trace-step-start 2 --trace-step-end 30", str(tmp_path))
    assert losses == run_world(1, traced, RUN, str(tmp_path / "plain"))[0][0]
    trace = read_trace(tmp_path / "trace" / "iterations-3-4.json.gz")
    assert problems(trace) == [] and [step.iteration for step in measured_steps(trace)] == [3, 4]
    assert "B(stage 0, microbatch 3)" in {event["name"] for event in trace["traceEvents"]}


SHIFT, RATE = 5_000_000_000, 1.001


def clocks_apart(rank: int, size: int) -> dict[str, Any]:
    """Simulate two hosts with two ranks each. The clock of the second host is ahead and runs fast."""

    def clock() -> int:
        now = time.perf_counter_ns()
        return round(now * RATE) + SHIFT if rank >= 2 else now

    own = measure(default_store(), rank, ["a", "a", "b", "b"], "first", clock)
    true = time.perf_counter_ns()
    last = measure(default_store(), rank, ["a", "a", "b", "b"], "last", clock)
    alignment = Alignment(own, last)
    error = abs(alignment(round(true * RATE) + SHIFT if rank >= 2 else true) - true)
    return alignment.as_json() | {"error_us": error / 1e3}


def test_clocks_of_two_hosts_agree_within_the_residual() -> None:
    results = run_world(4, clocks_apart)
    assert results[0]["residual_us"] == results[1]["residual_us"] == 0
    assert results[2]["offset_us"] < -4e6
    assert results[2]["error_us"] <= 1.01 * results[2]["residual_us"] + 1e-2


def test_alignment_is_a_line_through_both_measurements() -> None:
    alignment = Alignment(Offset(1000, 50, 8), Offset(3000, 70, 4))
    assert [alignment(at) for at in (1000, 2000, 3000)] == [1050, 2060, 3070]
    assert alignment.as_json() == {"offset_us": 0.05, "drift_us": 0.02, "residual_us": 0.004}


def test_a_run_reports_why_it_traces_nothing_and_traces_the_rest_when_resumed(tmp_path: Path) -> None:
    flags = RUN + f"--save {tmp_path}/save --load {tmp_path}/save --trace --trace-step-start 3 --trace-step-end "
    (said,) = run_world(1, traced_lines, flags + "6 --train-iters 2", str(tmp_path))
    assert said == [" no trace: the run has ended before --trace-step-start 3"]
    later = flags.replace("--trace-step-start 3", "--trace-step-start 1")
    (said,) = run_world(1, traced_lines, later + "3", str(tmp_path))
    assert said == [f" trace of iterations 3 to 3: {tmp_path}/trace/iterations-3-3.json.gz"]
    (said,) = run_world(1, traced_lines, later + "3 --train-iters 5", str(tmp_path))
    assert said == [" no trace: the run resumes at iteration 4, --trace-step-end is 3"]


class FakeEvent:
    """Fake CUDA event on an idle stream. The event completes as soon as it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter_ns()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) / 1e6


def test_device_spans_are_read_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, events of the host clock replace CUDA events."""
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    recorder = Recorder(torch.device("cuda"))
    args = {"kind": "F", "stage": 0, "microbatch": 0, "iteration": 1}
    with recorder.span("F", "pipeline", args):
        with recorder.span("wait for receive pp", "wait", {"axis": "pp"}):
            time.sleep(0.002)
        time.sleep(0.001)
    assert len(waited) == 1, "waits for the device only before and after the steps"
    spans = recorder.take()
    assert len(waited) == 2
    assert [span.track for span in spans] == [*["training thread"] * 2, *["GPU, training thread"] * 2]
    rank = RankTrace([list(span) for span in spans], [], {}, lambda at: at)
    trace = assemble([rank], {"pipelines": [[0]], "device": "cuda"}, None)
    assert problems(trace) == []
    (step,) = measured_steps(trace)
    on_device = spans[3]
    assert step.makespan == pytest.approx((on_device.stop - spans[2].stop) / 1e3, abs=2e-3)
