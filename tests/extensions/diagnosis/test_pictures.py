"""Drawings of traces, rank maps and memory: the numbers in them, and SVG that a parser accepts."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.extensions.diagnosis.trace.pipeline_timeline import measured_steps
from megatron.extensions.diagnosis.trace.trace_file import problems, read_trace, write_trace
from tests.extensions.diagnosis.trace_cases import simulated_trace
from tools.pictures import plot_memory, plot_ranks, plot_trace
from tools.pictures.charts import Series, curves, thinned
from tools.pictures.svg import byte_text, short_number, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_the_plan_of_a_step_that_ran_as_planned_is_its_measurement(tmp_path: Path, capsys) -> None:
    trace = simulated_trace()
    assert problems(trace) == []
    assert len(measured_steps(trace)) == 1
    found = trace["otherData"]["pipeline"]
    assert found["measured_us"] == pytest.approx(found["planned_us"], abs=0.01)
    assert found["measured_bubble"] == pytest.approx(found["planned_bubble"], abs=1e-6)
    assert trace["otherData"]["costs"]["message_us"] == pytest.approx(100, abs=0.01)
    write_trace(trace, tmp_path / "trace.json.gz")
    assert read_trace(tmp_path / "trace.json.gz") == trace
    output = tmp_path / "step.svg"
    flags = [str(tmp_path / "trace.json.gz"), "--output", str(output), "--phases", str(tmp_path / "phases.svg")]
    assert plot_trace.main(flags) == 0
    said = capsys.readouterr().out
    assert said.startswith("iteration 3, pipeline of ranks 0, 1, 2, 3: planned: ") and "measured: " in said
    bars = [rect for rect in ET.parse(output).iter(f"{SVG}rect") if "bar " in rect.get("class", "")]
    assert len(bars) == 2 * 4 * 3 * 8
    widths = {round(float(bar.get("width", 0)), 1) for bar in bars}
    assert max(widths) - min(widths) < 0.2
    phases = ET.parse(tmp_path / "phases.svg")
    assert sum(rect.get("class") == "c-optimizer" for rect in phases.iter(f"{SVG}rect")) == 4 + 1


def test_a_slow_micro_batch_is_seen_beside_the_plan() -> None:
    trace = simulated_trace("1f1b", slow=6.0)
    found = trace["otherData"]["pipeline"]
    assert found["measured_us"] > found["planned_us"] + 4000
    (step,) = measured_steps(trace)
    assert plot_trace.chosen(trace).makespan == step.makespan
    with pytest.raises(ValueError, match="--iteration 9: the trace has 3 to 3"):
        plot_trace.chosen(trace, 9)


def test_pictures_that_cannot_be_written_are_refused_first(tmp_path: Path, capsys) -> None:
    write_trace(simulated_trace(), tmp_path / "trace.json.gz")
    trace = str(tmp_path / "trace.json.gz")
    for program, flags, said in (
        (plot_trace, [trace, "--output", "a.png"], "--output a.png: must end in .svg; for example a.svg"),
        (
            plot_trace,
            [trace, "--output", "a.svg", "--phases", "/proc/no/b.svg"],
            "--phases /proc/no/b.svg: /proc cannot",
        ),
        (plot_ranks, ["--world-size", "4", "--output", "/proc/no/a.svg"], "--output /proc/no/a.svg: /proc cannot be"),
        (plot_memory, ["--trace", trace, "--output", "a"], "--output a: must end in .svg; for example a.svg"),
    ):
        with pytest.raises(ValueError, match=said):
            program.main(flags)
    assert capsys.readouterr().out == ""


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for data in (
        b"{",
        b'{"traceEvents": []}',
        b"[]",
        b'{"otherData": null}',
        b"\x1f\x8b\x08" + bytes(200),
        b"[" * 9999,
    ):
        other.write_bytes(data)
        with pytest.raises(ValueError, match="is not a trace"):
            read_trace(other)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda trace: trace["otherData"]["ranks"].pop(), "layout in otherData is not one of 3 ranks"),
        (lambda trace: trace["otherData"]["layout"].update(tp=0), "has no layout"),
        (lambda trace: trace["otherData"]["layout"].update(ep=3), "is not one of 4 ranks"),
        (lambda trace: trace["otherData"].update(pipelines=[[0, 1, 2, 2]]), "do not have each rank once"),
        (lambda trace: trace["otherData"]["ranks"][2].pop("host"), "does not say the host of rank 2"),
        (lambda trace: trace["otherData"]["ranks"][1].update(memory={"weights": "a"}), "the memory of rank 1 are not"),
        (lambda trace: trace["traceEvents"].append(7), "is no object"),
        (lambda trace: trace["traceEvents"][-1].update(ts=1e300), "times"),
        (lambda trace: trace["traceEvents"][-1].update(pid=9), "is of rank 9, which is not there"),
        (lambda trace: trace["traceEvents"][-1].pop("pid"), r"without \['pid'\]"),
        (lambda trace: [event.get("args", {}).pop("kind", 0) for event in trace["traceEvents"]], "not say its action"),
    ],
)
def test_what_damage_to_a_trace_is_named(tmp_path: Path, damage: Callable[[Any], Any], said: str) -> None:
    trace = simulated_trace()
    damage(trace)
    (tmp_path / "t.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=said):
        read_trace(tmp_path / "t.json")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """As on a full disk: the part that was written would keep it full."""
    (tmp_path / "t.json.gz").mkdir()
    with pytest.raises(IsADirectoryError):
        write_trace(simulated_trace(), tmp_path / "t.json.gz")
    assert not list(tmp_path.glob("*.tmp"))


def test_groups_that_cross_nodes(tmp_path: Path, capsys) -> None:
    output = tmp_path / "ranks.svg"
    flags = "--world-size 32 --gpus-per-node 8 --tp 4 --pp 2 --cp 2 --ep 4 --expert-tensor-parallel-size 1".split()
    assert plot_ranks.main([*flags, "--output", str(output)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "32 ranks on 4 nodes: TP 4, CP 2, EP 4, DP 2, PP 2"
    assert "node 1       ranks 8-15         tp 0-3, cp 0,1, ep 0-3, dp 1, pp 0" in said
    assert "TP: 8 groups of 4, within nodes" in said
    assert "DP: 16 groups of 2, all cross nodes, up to 2 nodes each; such as ranks 0,8" in said
    cells = [rect for rect in ET.parse(output).iter(f"{SVG}rect") if " h-" in rect.get("class", "")]
    assert len(cells) == 32
    uneven = plot_ranks.main([*"--world-size 16 --gpus-per-node 6 --tp 8 --pp 2 --output".split(), str(output)])
    assert uneven == 0 and "crossing" in output.read_text()
    assert "TP: 2 groups of 8, all cross nodes, up to 2 nodes each" in capsys.readouterr().out
    found = plot_ranks.map_of_trace(simulated_trace(hosts=("a", "b")))
    assert found.ranks_of == {"a": [0, 1], "b": [2, 3]} and found.crossing("pp") == (1, 1, 2)
    with pytest.raises(ValueError, match="world size 6 must be a multiple"):
        plot_ranks.main(["--world-size", "6", "--tp", "4"])


def test_planned_and_held_memory(tmp_path: Path, capsys) -> None:
    plan = tmp_path / "plan.json"
    sizes = {"weights": 4000, "gradients": 4000, "optimizer": 8000, "activations": 1500, "working": 500, "host": 0}
    plan.write_text(json.dumps({"memory": [{"pp_rank": rank, **sizes, "total": 18000} for rank in range(4)]}))
    write_trace(simulated_trace(), tmp_path / "t.json.gz")
    output = tmp_path / "memory.svg"
    flags = ["--plan", str(plan), "--trace", str(tmp_path / "t.json.gz"), "--output", str(output)]
    assert plot_memory.main(flags) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("pp 0: planned 17.6 KiB: weights 3.91 KiB")
    assert said[1] == (
        "pp 0, rank 0: held 15.6 KiB: weights 3.91 KiB, gradients 3.91 KiB, optimizer 7.81 KiB; the process 768 MiB"
    )
    bars = [rect for rect in ET.parse(output).iter(f"{SVG}rect") if "bar " in rect.get("class", "")]
    assert len(bars) == 4 * 5 + 4 * 3
    plan.write_text('{"memory": [3]}')
    with pytest.raises(ValueError, match="is not a plan"):
        plot_memory.main(["--plan", str(plan)])


def test_long_curves_keep_their_spikes() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    kept = thinned(points)
    assert len(kept) <= 1500 and (77_777.0, 9.0) in kept and kept == sorted(kept)
    assert curves("loss", "", [Series("a", [(1, float("nan"))])]) is None
    chart = curves("loss", "nats", [Series("a <b>", [(1, 2.0)]), Series("c", [(1, 2.0), (2, float("inf")), (3, 4.0)])])
    assert chart is not None and "a &lt;b&gt;" in chart.inline()
    ET.fromstring(chart.file())


def test_a_legend_that_is_too_long_has_a_row_of_its_own() -> None:
    heights = []
    for name in ("a", "a run with a long name"):
        series = [Series(f"{name}{number}", [(1, 2.0), (2, 3.0)]) for number in range(3)]
        chart = curves("loss", "nats per token; red: restarts", series)
        assert chart is not None
        rows = {text.text: float(text.get("y", 0)) for text in ET.fromstring(chart.file()).iter(f"{SVG}text")}
        heights.append(rows[f"{name}0"] - rows["loss (nats per token; red: restarts)"])
    assert heights == [0.0, 18.0]


def test_round_numbers() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10] and ticks(3, 3) == [3]
    assert [short_number(x) for x in (0.00123, 1234, 6876.0, 5.6e13)] == ["0.00123", "1234", "6876", "56T"]
    assert [byte_text(x) for x in (12, 2048, 1.5 * 2**30)] == ["12 bytes", "2 KiB", "1.5 GiB"]
