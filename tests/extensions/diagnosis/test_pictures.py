"""Test that drawings of traces, rank maps and memory show the right numbers and are valid SVG."""

from __future__ import annotations

import gzip
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgba

from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import measured_steps
from megatron.extensions.observe.diagnosis.trace.trace_file import read_trace, write_trace
from tests.extensions.diagnosis.trace_cases import problems, simulated_trace
from tools.pictures import drawing, plot_memory, plot_ranks, plot_trace
from tools.pictures.drawing import COLOURS

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(path: Path) -> list[str]:
    """Parse an SVG file and return the text of its text elements."""
    return [text.text or "" for text in ET.parse(path).iter(f"{SVG}text")]


def test_plan_and_measurement_agree_if_a_step_ran_as_planned(tmp_path: Path, capsys) -> None:
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
    assert {"planned", "measured"} <= {text.split(",")[0] for text in texts_of(output)}
    step = plot_trace.chosen(trace)
    rows = [rank for axes in plot_trace.timeline_picture(trace, step).axes for rank in axes.collections]
    widths = [bar.get_extents().width for rank in rows for bar in rank.get_paths()]
    assert len(widths) == 2 * 4 * 3 * 8 and max(widths) - min(widths) < 1
    assert "optimizer" in texts_of(tmp_path / "phases.svg")
    phases = plot_trace.phases_picture(trace, 3).axes[0].collections
    fills = [tuple(fill) for rank in phases for fill in rank.get_facecolor()]
    assert fills.count(to_rgba(COLOURS["optimizer"])) == 4
    slow = simulated_trace("1f1b", slow=6.0)["otherData"]["pipeline"]
    assert slow["measured_us"] > slow["planned_us"] + 4000


def test_impossible_pictures_are_refused_first(tmp_path: Path, capsys) -> None:
    write_trace(simulated_trace(), tmp_path / "trace.json.gz")
    trace = str(tmp_path / "trace.json.gz")
    for program, flags, said in (
        (plot_trace, [trace, "--output", "a.txt"], "--output a.txt: must end with .*; for example a.png"),
        (plot_trace, [trace, "--output", "a.svg", "--phases", "/proc/b.svg"], "--phases /proc/b.svg: /proc cannot"),
        (plot_trace, [trace, "--output", "a.svg", "--iteration", "9"], "--iteration 9: the trace has 3 to 3"),
        (plot_ranks, ["--world-size", "4", "--output", "/proc/no/a.svg"], "--output /proc/no/a.svg: /proc cannot be"),
        (plot_ranks, ["--world-size", "6", "--tp", "4"], "world size 6 must be a multiple"),
        (plot_memory, ["--trace", trace, "--output", "a"], "--output a: must end with the kind of picture"),
    ):
        with pytest.raises(ValueError, match=said):
            program.main(flags)
    assert capsys.readouterr().out == ""


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    damaged = b"\x1f\x8b\x08" + bytes(200), gzip.compress(b"[" * 999)[:-9], b"[" * 9999
    for data in (b"{", b'{"traceEvents": []}', b"[]", b'{"otherData": null}', *damaged):
        other.write_bytes(data)
        with pytest.raises(ValueError, match="is not a trace"):
            read_trace(other)


DAMAGE = [
    (lambda trace: trace["otherData"]["ranks"].pop(), "layout in otherData is not one of 3 ranks"),
    (lambda trace: trace["otherData"]["layout"].update(tp=0), "has no layout"),
    (lambda trace: trace["otherData"]["layout"].update(ep=3), "is not one of 4 ranks"),
    (lambda trace: trace["otherData"].update(pipelines=[[0, 1, 2, 2]]), "do not contain each rank once"),
    (lambda trace: trace["otherData"]["ranks"][2].pop("host"), "does not contain the host of rank 2"),
    (lambda trace: trace["otherData"]["ranks"][1].update(memory={"weights": "a"}), "the memory of rank 1 are not"),
    (lambda trace: trace["traceEvents"].append(7), "is no object"),
    (lambda trace: trace["traceEvents"][-1].update(ts=1e300), "times"),
    (lambda trace: trace["traceEvents"][-1].update(pid=9), "is of rank 9, which is not there"),
    (lambda trace: trace["traceEvents"][-1].pop("pid"), r"without \['pid'\]"),
    (lambda trace: [event.get("args", {}).pop("kind", 0) for event in trace["traceEvents"]], "not specify its action"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_damage_to_a_trace_is_named(tmp_path: Path, damage: Callable[[Any], Any], said: str) -> None:
    trace = simulated_trace()
    damage(trace)
    (tmp_path / "t.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=said):
        read_trace(tmp_path / "t.json")


def test_groups_that_cross_nodes_are_marked(tmp_path: Path, capsys) -> None:
    output = tmp_path / "ranks.svg"
    flags = "--world-size 32 --gpus-per-node 8 --tp 4 --pp 2 --cp 2 --ep 4 --expert-tensor-parallel-size 1".split()
    assert plot_ranks.main([*flags, "--output", str(output)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "32 ranks on 4 nodes: TP 4, CP 2, EP 4, DP 2, PP 2"
    assert "node 1       ranks 8-15         tp 0-3, cp 0,1, ep 0-3, dp 1, pp 0" in said
    assert "TP: 8 groups of 4, within nodes" in said
    assert "DP: 16 groups of 2, all cross nodes, up to 2 nodes each; for example, ranks 0,8" in said
    assert {f"rank {rank}" for rank in range(32)} <= set(texts_of(output))
    uneven = plot_ranks.main([*"--world-size 16 --gpus-per-node 6 --tp 8 --pp 2 --output".split(), str(output)])
    assert uneven == 0 and "red frame: TP crosses nodes" in output.read_text()
    assert "TP: 2 groups of 8, all cross nodes, up to 2 nodes each" in capsys.readouterr().out
    found = plot_ranks.map_of_trace(simulated_trace(hosts=("a", "b")))
    assert found.ranks_of == {"a": [0, 1], "b": [2, 3]} and found.crossing("pp") == (1, 1, 2)


def test_planned_and_measured_memory_are_drawn(tmp_path: Path, capsys, monkeypatch) -> None:
    plan = tmp_path / "plan.json"
    sizes = {"weights": 4000, "gradients": 4000, "optimizer": 8000, "activations": 1500, "working": 500, "host": 0}
    plan.write_text(json.dumps({"memory": [{"pp_rank": rank, **sizes, "total": 18000} for rank in range(4)]}))
    trace = simulated_trace()
    memory = trace["otherData"]["ranks"]
    write_trace(trace, tmp_path / "t.json.gz")
    output = tmp_path / "memory.svg"
    flags = ["--plan", str(plan), "--trace", str(tmp_path / "t.json.gz"), "--output", str(output)]
    assert plot_memory.main(flags) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("pp 0: planned 17.58 KiB: weights 3.91 KiB")
    assert said[1] == (
        "pp 0, rank 0: held 15.62 KiB: weights 3.91 KiB, gradients 3.91 KiB, optimizer 7.81 KiB; the process 768.00 MiB"
    )
    rows = [text for text in texts_of(output) if text.startswith("pp ")]
    assert sorted(rows) == sorted([f"pp {n} planned" for n in range(4)] + [f"pp {n}, rank {n} held" for n in range(4)])
    every = [*plot_memory.planned_bars(plot_memory.read_plan(plan)), *plot_memory.measured_bars(memory)]
    assert len(plot_memory.memory_picture(every).axes[0].patches) == 4 * 5 + 4 * 3
    monkeypatch.setattr("tools.common.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--output a.svg: needs matplotlib: pip install 'paritrain\[plot\]'"):
        plot_memory.main(["--plan", str(plan), "--output", "a.svg"])
    plan.write_text('{"memory": [3]}')
    with pytest.raises(ValueError, match="is not a plan"):
        plot_memory.main(["--plan", str(plan)])
    plan.write_text('{"problems": [{"flag": "--tp", "text": "--tp 3: must divide 8"}]}')
    with pytest.raises(ValueError, match=r"the dry run refused the flags \(--tp 3: must divide 8\); correct them"):
        plot_memory.main(["--plan", str(plan)])


def test_charts_omit_values_that_no_axis_can_show() -> None:
    extreme = [(1.0, 1e308), (2.0, -1e308), (3.0, 1e-320), (1e300, 2.0), (4.0, math.nan)]
    assert drawing.curves("loss", "", [drawing.Series("", extreme)]) is None
    figure = drawing.curves("loss", "", [drawing.Series("", [*extreme, (5.0, 2.5), (6.0, 0.0)])])
    assert figure is not None and "<svg" in drawing.inline(figure)
