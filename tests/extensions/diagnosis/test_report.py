"""Tests of run reports: the contents for each kind of run, and how a browser displays a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron.extensions.observe.diagnosis.trace.trace_file import write_trace
from megatron.training.reliability.run_status import record_event
from tests.extensions.diagnosis.trace_cases import simulated_trace
from tools.pictures import report_sections as sections
from tools.pictures.compared_runs import AXES, along, spent
from tools.pictures.drawing import NARROW
from tools.pictures.run_folder import RunFolder, labels_of, read_run
from tools.report import computed_plan, main

SECTIONS = "summary loss throughput goodput memory layout timeline saves faults-and-restarts configuration".split()
ATTACK = "<script>alert('x')</script>&\"quoted\""

CONFIG = f"""# Resolved configuration.
# parallel
tensor-model-parallel-size: 2
pipeline-model-parallel-size: 2
context-parallel-size: 1
# derived: data-parallel-size: 2
wandb-exp-name: '{ATTACK.replace("'", "''")}'
train-iters: 400
lr: 0.001
"""
TRACED = CONFIG.replace("tensor-model-parallel-size: 2", "tensor-model-parallel-size: 1").replace(
    "pipeline-model-parallel-size: 2", "pipeline-model-parallel-size: 4"
)
"""Configuration with the same parallel layout as the trace that `simulated_trace` returns."""


def page_of(folder: Path, *flags: str) -> tuple[str, str]:
    """Write a report, and check that it is well-formed, has all sections, loads no resources and runs no code. Return
    the text and the HTML source of the report."""
    assert main([str(folder), "--no-plan", *flags]) == 0
    source = (folder / "report.html").read_text(encoding="utf-8")
    elements = list(ElementTree.fromstring(source).iter())
    ids = [name for each in elements if (name := each.get("id"))]
    assert [name for name in ids if not name.endswith("-title") and not name.startswith("picture-")] == SECTIONS
    assert len(ids) == len(set(ids)) and not any(each.tag == "script" for each in elements)
    for name, value in (item for each in elements for item in each.items()):
        assert not name.startswith("on")
        if name.rpartition("}")[2] in ("src", "href", "data", "action", "srcset"):
            assert value.startswith("#") and value[1:] in ids
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", source)
    return "\n".join(elements[0].itertext()), source


def write_metrics(folder: Path, count: int, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for iteration in range(1, count + 1):
            record = {"iteration": iteration, "lm_loss": 8 / iteration + 2, "grad_norm": 1.0, "learning_rate": 1e-3}
            record |= {"tokens_per_second": 6876.0, "step_time": 0.5, "peak_memory_bytes": 2**30}
            record |= {"skipped_iterations": 0, "nan_iterations": 0, "time": 1.7e9 + iteration}
            file.write(json.dumps(record | more) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create the files of a run that crashed once. The run has a trace, a checkpoint, and hostile text wherever the
    report shows text from a run."""
    folder = tmp_path / "a <b>run"
    write_metrics(folder, 40, layer_alarms=[ATTACK], audits=3)
    with (folder / "metrics.jsonl").open("a") as file:
        for line in ('{"iteration": 40, "valid_loss": 2.5}\n', '{"iteration": 41, "lm_loss": "NaN"}\n', '{"iter'):
            file.write(line)
    (folder / "run_config.yaml").write_text(TRACED)
    record_event(folder, "start", iteration=0, world_size=4)
    record_event(folder, "save", iteration=20, seconds=1.25)
    record_event(folder, "save", iteration=30, seconds=0.5, error=ATTACK, complete=False)
    record_event(folder, "end", name="FAILED", why=f"rank 3 of 4: {ATTACK}")
    record_event(folder, "start", iteration=20, world_size=4)
    facts = {"detected_after": 0.41, "recovered_after": 4.68, "steps_lost": 1, "rung": "restart in the job"}
    record_event(folder, "recovery", what="process is gone", who=ATTACK, source="copies in memory", **facts)
    wrong = {"ranks": [2, 3], "hosts": ["one", ATTACK], "first": f"output {ATTACK}", "cause": "the output differs"}
    record_event(folder, "audit", iteration=20, relative_difference=0.25, disagreements=1, **wrong)
    for iteration, size in ((10, 4000), (20, 3000), (30, None)):
        checkpoint = folder / f"iter_{iteration:07}"
        checkpoint.mkdir()
        (checkpoint / "__0_0.distcp").write_bytes(bytes(3000))
        if size is not None:
            sums = {"__0_0.distcp": {"bytes": size, "crc32": 0}}
            (checkpoint / "manifest.json").write_text(json.dumps({"files": sums}))
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    (folder / "stacks").mkdir()
    (folder / "stacks/rank-00003.txt").write_text(f"Fatal {ATTACK}")
    trace = simulated_trace(hosts=("one", ATTACK))
    write_trace(trace, folder / "trace/iterations-3-3.json.gz")
    return folder


def test_the_report_of_a_run_has_all_sections(run: Path) -> None:
    text, source = page_of(run)
    for said in (
        "no end recorded: still running, or killed",
        "41 of 400",
        "2.5000 at 40",
        "tokens/s, median\n6876",
        "metrics.jsonl: 1 damaged line skipped; it is the last line, so the run was killed while writing it",
        "4 ranks on 2 nodes",
        "PP: 1 group of 4, crosses nodes, up to 2 nodes each; for example, ranks 0-3",
        "iteration 3, pipeline of ranks 0, 1, 2, 3: planned: ",
        "The run was started 2 times.",
        "3 steps were audited; ranks disagreed in 1.",
        "2, 3",
        "The training loss of 1 of 41 records is NaN or infinite.",
        "end: FAILED",
        "process is gone\n0.41\n4.68\n1\nrestart in the job\ncopies in memory",
        "not complete: there is no manifest.json in it",
        "not complete: __0_0.distcp has 3000 bytes, not 4000",
        "20 (latest)",
        "pp 0, rank 0: held 15.62 KiB",
    ):
        assert said in text, said
    assert "<script" not in source and text.count(ATTACK) >= 6
    assert source.count("<svg ") >= 9 and source.count("<table>") >= 6
    assert not list(run.glob("*.tmp"))


def test_the_difference_from_another_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other $x$"
    write_metrics(other, 10)
    (other / "run_config.yaml").write_text(TRACED.replace("0.001", "0.002").replace("train-iters: 400\n", ""))
    text, _ = page_of(run, "--against", str(other))
    assert "2 values that differ" in text and "other $x$" in text and "not set" in text


def test_a_branch_counts_only_its_own_time_and_flops() -> None:
    """The branched run has two log lines after iteration 100. Each log line covers 10 steps of 0.5 seconds. The time is
    the same if the run has no recorded events."""
    lines = [{"iteration": at, "lm_loss": 2.0, "consumed_tokens": at, "step_time": 0.5} for at in (110, 120)]
    for events in ([{"event": "start", "iteration": 100}], []):
        branch = RunFolder(Path("branch"), lines, events=events)
        assert list(spent(branch, "hours")) == [(110, pytest.approx(5 / 3600)), (120, pytest.approx(10 / 3600))]


def test_several_runs_are_compared_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report plots losses against tokens, time and FLOPs."""
    for name, count, loss in (("worse", 8, 2.5), ("best", 4, 2.25)):
        write_metrics(tmp_path / name, count, tflops_per_device=0.25)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"consumed_tokens": 100 * line["iteration"]} for line in lines]
        lines.append({"iteration": count, "valid_loss": loss})
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (tmp_path / name / "run_config.yaml").write_text(CONFIG.replace("400", str(count)))
        record_event(tmp_path / name, "start", iteration=0, world_size=4)
    output = tmp_path / "all.html"
    assert main([str(tmp_path / "worse"), str(tmp_path / "best"), "--output", str(output)]) == 0
    text = "\n".join(ElementTree.fromstring(output.read_text()).itertext())
    assert re.search(r"by the last validation loss.*best\s+2\.2500.*worse\s+2\.5000", text, re.DOTALL)
    for said in ("loss over tokens", "loss over hours of training", "loss over FLOPs", "values that differ"):
        assert said in text, said
    best = read_run(tmp_path / "best")
    (tmp_path / "died").mkdir()
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "outcome").write_text("name=FAILED\n")
    runs = [str(tmp_path / name) for name in ("died", "worse", "failed", "best")]
    assert main([*runs, "--output", str(output)]) == 0
    assert output.read_text().count("2 runs") and "failed" not in output.read_text()
    said = capsys.readouterr().out
    assert [f"{tmp_path}/{name}: omitted, because it has no record yet" in said for name in ("died", "failed")] == [
        True
    ] * 2
    with pytest.raises(ValueError, match="none of the runs has a record"):
        main([runs[0], runs[2], "--output", str(output)])
    assert [list(spent(best, axis))[-1] for axis in AXES] == [(4, 400), (4, pytest.approx(2 / 3600)), (4, 2e12)]
    assert along(best.values("valid_loss"), list(spent(best, "tokens"))) == [(400, 2.25)]
    with pytest.raises(ValueError, match="--against: applies only to the page of one run"):
        main([str(tmp_path / "worse"), str(tmp_path / "best"), "--against", str(tmp_path / "best")])


def test_several_runs_share_each_chart(run: Path, tmp_path: Path) -> None:
    """In the charts of loss, gradient norm, learning rate and throughput, each run has one color. The validation losses
    of a run have the color of this run."""
    for name in ("b", "c"):
        write_metrics(tmp_path / name, 10)
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 10, "valid_loss": 2.5}\n')
    runs = [read_run(path) for path in (run, tmp_path / "b", tmp_path / "c")]
    pictures = re.findall(
        r"<svg.*?</svg>", sections.loss(runs[0], runs[1:]) + sections.throughput(runs[0], runs[1:]), re.S
    )
    assert len(pictures) == 5
    for picture in pictures:
        assert [name in picture for name in (">b<", ">c<")] == [True, True]
        assert {"#1f77b4", "#ff7f0e", "#2ca02c"} <= set(re.findall(r"stroke: (#\w+)", picture))
    dots = re.findall(r"<use [^>]*style=\"fill: (#\w+)", pictures[0])
    assert dots[-3:] == ["#1f77b4", "#ff7f0e", "#2ca02c"] and "dots: validation" in pictures[0]
    page_of(run, "--against", str(tmp_path / "b"), str(tmp_path / "c"))
    (alone,) = re.findall(r"<svg.*?</svg>", sections.loss(runs[1], []), re.S)[:1]
    assert set(re.findall(r"<use [^>]*style=\"fill: (#\w+)", alone)) == {"#1f77b4"}


def test_phases_are_marked_in_every_chart(run: Path) -> None:
    begun = [("main", 0), ("long <b>", 80), ("end", 200)]
    stages = [{"name": name, "first_sample": first, "planned": [], "values": None} for name, first in begun]
    write_metrics(run, 40)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line | {"consumed_samples": 8 * line["iteration"]}) + "\n" for line in lines)
    )
    (run / "iter_0000020/metadata.json").write_text(json.dumps({"stages": stages}))
    (run / "iter_0000030/metadata.json").write_text('{"stages": [3]}')
    found = read_run(run)
    assert found.phases == [(0.0, "main"), (10.0, "long <b>"), (25.0, "end")]
    pictures = re.findall(r"<svg.*?</svg>", sections.loss(found, []) + sections.throughput(found, []), re.S)
    assert len(pictures) == 5 and all(">end</text>" in each and ">long &lt;b&gt;</text>" in each for each in pictures)


def test_wide_pictures_have_a_narrow_one_for_phones(run: Path) -> None:
    """A browser shows either the wide or the narrow version of a picture. Tables do not wrap short text."""
    source = page_of(run)[1]
    widths = {
        look: re.findall(rf'<div class="{look}"><figure><svg[^>]* width="([\d.]+)pt', source)
        for look in ("wide", "narrow")
    }
    assert len(widths["wide"]) == len(widths["narrow"]) == 4
    assert max(map(float, widths["narrow"])) <= 72 * NARROW + 1 < 72 * 6 <= min(map(float, widths["wide"])) + 1
    assert sections.cell_look("2026-11-28 16:50:44") == "short" and sections.cell_look("x" * 40) == "long"
    assert sections.cell_look("three words that are long enough to wrap") == ""


def test_a_run_resumed_under_another_layout_is_reported(run: Path) -> None:
    """The report describes the ranks of the last start. If the trace is from an earlier start with a different layout,
    the report states this. If the event log contains a start without an end, the run was killed."""
    record_event(run, "start", iteration=30, world_size=8)
    (run / "run_config.yaml").write_text(CONFIG)
    text, _ = page_of(run)
    assert "8 ranks on 1 node" in text and "rank 0: held" not in text
    assert "traced under a different layout than its last start: PP 4" in text
    assert "The run was started 3 times; 1 time it recorded no end." in text


def test_the_trace_of_a_tensorboard_folder_that_moved_with_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    write_metrics(folder, 3)
    (folder / "run_config.yaml").write_text(f"{TRACED}save: runs/a\ntensorboard-dir: runs/a/tensorboard\n")
    write_trace(simulated_trace(), folder / "tensorboard/trace/iterations-3-3.json.gz")
    assert "iteration 3, pipeline of ranks 0, 1, 2, 3: planned: " in page_of(folder)[0]


LARGE = "1" + 600 * "0"
REMAINS: list[Any] = [
    ({"outcome": "name=FAILED"}, "metrics.jsonl: is missing"),
    ({"metrics.jsonl": ""}, "has no record with an iteration"),
    ({"metrics.jsonl": "\x00\x01\n[1]\n{}\n" + '"text"\n', "run_config.yaml": "a: [1"}, "3 damaged lines skipped"),
    ({"run_config.yaml": "- 1\n", "run_events.jsonl": '{"event": 3}\n{"event": "end"}'}, "The layout is unknown"),
    (
        {
            "metrics.jsonl": f'{{"iteration": 1, "lm_loss": {LARGE}, "layer_alarms": 5}}\n{{"iteration": {LARGE}}}\n'
            f'{{"iteration": {LARGE * 9}}}',
            "run_events.jsonl": '{"event": "start", "world_size": 0}',
        },
        "1 damaged line skipped",
    ),
    (
        {"metrics.jsonl": '{"iteration": 1, "lm_loss": "NaN", "tokens_per_second": "NaN"}'},
        "The training loss of 1 of 1 records is NaN",
    ),
    (
        {"metrics.jsonl": '{"iteration": 1, "lm_loss": "Infinity", "time": "x"}', "trace/iterations-1-2.json.gz": "x"},
        "is not a trace",
        "The trace iterations-1-2.json.gz could not be read; see the summary.",
    ),
    ({"metrics.jsonl": '{"iteration": 1, "lm_loss": [1], "grad_norm": true}', "outcome": "name=FAILED\n"}, "failed"),
]


@pytest.mark.parametrize("remains", REMAINS)
def test_a_run_with_few_remaining_files_is_reported(tmp_path: Path, remains: Any) -> None:
    files, *said = remains
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    text, _ = page_of(tmp_path)
    assert all(each in text for each in said)


def test_the_page_of_a_long_run_stays_small_and_keeps_spikes(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20_000)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 15000, "grad_norm": 9.0}\n')
    _, text = page_of(tmp_path)
    assert len(text) < 600_000
    until_title = text[: text.index("gradient norm (before clipping)")]
    *_, curve = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #1f77b4', until_title)
    heights = sorted(float(y) for y in re.findall(r"[ML] \S+ (\S+)", curve))
    # Y coordinates in SVG are measured from the top, and the axis starts at loss 0.
    assert 0 < heights[0] < heights[-1] / 2


def test_the_layout_without_a_trace(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    (tmp_path / "run_config.yaml").write_text(CONFIG)
    text, _ = page_of(tmp_path, "--gpus-per-node", "4")
    assert read_run(tmp_path).world_size == 8
    assert "PP: 4 groups of 2, all cross nodes, up to 2 nodes each; for example, ranks 0,4" in text


def test_the_plan_of_a_run_whose_tokenizer_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "checkpoints"
    write_metrics(folder, 3)
    model = "num-layers: 2\nhidden-size: 16\nnum-attention-heads: 2\nseq-length: 8\nmicro-batch-size: 1\ncpu: true\n"
    tokenizer = "tokenizer-type: SentencePieceTokenizer\ntokenizer-model: gone.model\n# derived: vocab-size: 300\n"
    (folder / "run_config.yaml").write_text(CONFIG + model + tokenizer)
    found = read_run(folder)
    plan, why = computed_plan(found)
    assert why == "" and plan is not None and found.name == "a"
    assert [rank["pp_rank"] for rank in plan] == [0, 1] and all(rank["weights"] > 0 for rank in plan)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent is missing: .*; name the --save folder of a run"):
        main([str(tmp_path / "absent")])
    write_metrics(tmp_path / "a" / "checkpoints", 1)
    with pytest.raises(ValueError, match=f"did you mean {tmp_path}/a/checkpoints"):
        main([str(tmp_path / "a")])
    with pytest.raises(ValueError, match="is not a file that can be written"):
        main([str(tmp_path / "a" / "checkpoints"), "--no-plan", "--output", str(tmp_path)])


def test_runs_are_named_after_their_folders(tmp_path: Path) -> None:
    def labels(*names: str) -> list[str]:
        return labels_of([RunFolder(tmp_path / name) for name in names])

    assert labels("quickstart/checkpoints") == ["quickstart"]
    assert labels("a/checkpoints", "b/checkpoints", "b/c") == ["a", "b", "b/c"]
    assert labels("a", "a/checkpoints") == ["a", "a/checkpoints"]
