"""The report of a run: what is in it, of any run, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron.extensions.diagnosis.trace.trace_file import write_trace
from megatron.training.reliability.run_status import record_event
from tests.apart import run_command
from tests.extensions.diagnosis.trace_cases import simulated_trace
from tests.pure.test_output_files import check_pipe
from tools import report
from tools.pictures.run_folder import read_run
from tools.report import computed_plan, main

SECTIONS = "summary loss throughput memory layout timeline saves faults-and-restarts configuration".split()
VOID = {"meta", "link", "br", "img", "input", "hr"}
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
"""The layout of `simulated_trace`."""


class Page(HTMLParser):
    """Checks that tags are balanced, and collects ids, text and whatever is fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: dict[str, int] = {}
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} {name}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def sections_of(page: Page) -> list[str]:
    return [each for each in page.ids if not each.endswith("-title") and not each.startswith("picture-")]


def page_of(folder: Path, *flags: str) -> tuple[Page, str]:
    assert main([str(folder), "--no-plan", *flags]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert sections_of(page) == SECTIONS
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert "script" not in page.tags and not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", text)
    assert len(page.ids) == len(set(page.ids)) and page.tags["h1"] == 1
    return page, text


def write_metrics(folder: Path, count: int, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for iteration in range(1, count + 1):
            record = {"iteration": iteration, "lm_loss": 8 / iteration + 2, "grad_norm": 1.0, "learning_rate": 1e-3}
            record |= {
                "tokens_per_second": 1000.0,
                "step_time": 0.5,
                "peak_memory_bytes": 2**30,
                "time": 1.7e9 + iteration,
            }
            file.write(json.dumps(record | {"skipped_iterations": 0, "nan_iterations": 0} | more) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that crashed once, with a trace, a checkpoint, and hostile text wherever text comes from a run."""
    folder = tmp_path / "a <b>run"
    write_metrics(folder, 40, layer_alarms=[ATTACK])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"iteration": 40, "valid_loss": 2.5}\n{"iteration": 41, "lm_loss": "NaN", "nan_iterations": 1}\n{"iter'
        )
    (folder / "run_config.yaml").write_text(TRACED)
    record_event(folder, "start", iteration=0, world_size=4)
    record_event(folder, "save", iteration=20, seconds=1.25)
    record_event(folder, "save", iteration=30, seconds=0.5, error=ATTACK, complete=False)
    record_event(folder, "end", name="FAILED", why=f"rank 3 of 4: {ATTACK}")
    record_event(folder, "start", iteration=20, world_size=4)
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


def test_all_sections_of_a_run(run: Path) -> None:
    page, text = page_of(run)
    for said in (
        "no end recorded: still running, or killed",
        "41 of 400",
        "2.5000 at 40",
        "metrics.jsonl: 1 damaged line skipped, the last one: the run was killed while it wrote",
        "4 ranks on 2 nodes",
        "PP: 1 group of 4, crosses nodes, up to 2 nodes each; such as ranks 0-3",
        "iteration 3, pipeline of ranks 0, 1, 2, 3: planned: ",
        "The run was started 2 times.",
        "The training loss of 1 of 41 records is NaN or infinite.",
        "end: FAILED",
        "not complete: there is no manifest.json in it",
        "not complete: __0_0.distcp has 3000 bytes, not 4000",
        "20 (latest)",
        "pp 0, rank 0: held 15.62 KiB",
    ):
        assert said in page.text, said
    assert "<script" not in text and page.text.count(ATTACK) >= 6
    assert page.tags["svg"] >= 9 and page.tags["table"] >= 6
    assert not list(run.glob("*.tmp"))


def test_the_difference_from_another_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_metrics(other, 10)
    (other / "run_config.yaml").write_text(TRACED.replace("0.001", "0.002").replace("train-iters: 400\n", ""))
    page, _ = page_of(run, "--against", str(other))
    assert "2 values that differ" in page.text and "training, other" in page.text and "not set" in page.text


def test_a_run_that_went_on_at_another_layout(run: Path) -> None:
    """What is said of ranks is of the last start; what was traced before is told apart. A start behind a start tells of
    a kill."""
    record_event(run, "start", iteration=30, world_size=8)
    (run / "run_config.yaml").write_text(CONFIG)
    page, _ = page_of(run)
    assert "8 ranks on 1 node" in page.text and "rank 0: held" not in page.text
    assert "traced at another layout than that of its last start: PP 4" in page.text
    assert "The run was started 3 times; 1 time it recorded no end." in page.text


def test_the_trace_of_a_tensorboard_folder_that_moved_with_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    write_metrics(folder, 3)
    (folder / "run_config.yaml").write_text(f"{TRACED}save: runs/a\ntensorboard-dir: runs/a/tensorboard\n")
    write_trace(simulated_trace(), folder / "tensorboard/trace/iterations-3-3.json.gz")
    assert "iteration 3, pipeline of ranks 0, 1, 2, 3: planned: " in page_of(folder)[0].text


LARGE = "1" + 600 * "0"
REMAINS: dict[str, tuple[dict[str, str], str]] = {
    "no metrics": ({"outcome": "name=FAILED"}, "metrics.jsonl: not there"),
    "an empty file": ({"metrics.jsonl": ""}, "has no record with an iteration"),
    "lines that are no records": (
        {"metrics.jsonl": "\x00\x01\n[1]\n{}\n" + '"text"\n', "run_config.yaml": "a: [1"},
        "3 damaged lines skipped",
    ),
    "a list for a configuration": (
        {"run_config.yaml": "- 1\n- 2\n", "run_events.jsonl": '{"event": 3}\n{"event": "end"}'},
        "The layout is not known",
    ),
    "numbers and lists that no run writes": (
        {
            "metrics.jsonl": f'{{"iteration": 1, "lm_loss": {LARGE}, "layer_alarms": 5}}\n{{"iteration": {LARGE}}}\n'
            f'{{"iteration": {LARGE * 9}}}',
            "run_events.jsonl": '{"event": "start", "world_size": 0}',
        },
        "1 damaged line skipped",
    ),
    "losses that are all NaN": (
        {"metrics.jsonl": '{"iteration": 1, "lm_loss": "NaN", "tokens_per_second": "NaN"}'},
        "The training loss of 1 of 1 records is NaN",
    ),
    "a cut trace": (
        {"metrics.jsonl": '{"iteration": 1, "lm_loss": "Infinity", "time": "x"}', "trace/iterations-1-2.json.gz": "x"},
        "is not a trace",
    ),
    "values of other types": (
        {"metrics.jsonl": '{"iteration": 1, "lm_loss": [1], "grad_norm": true}', "outcome": "name=FAILED\nwhy=x"},
        "failed",
    ),
}


@pytest.mark.parametrize("name", REMAINS)
def test_a_run_of_which_little_is_left(tmp_path: Path, name: str) -> None:
    files, said = REMAINS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    page, _ = page_of(tmp_path)
    assert said in page.text


def test_a_trace_that_is_cut_is_not_said_to_be_missing(run: Path) -> None:
    trace = run / "trace/iterations-3-3.json.gz"
    trace.write_bytes(trace.read_bytes()[:-100])
    page, _ = page_of(run)
    assert "iterations-3-3.json.gz is not a trace: " in page.text and "No trace:" not in page.text
    assert "The trace iterations-3-3.json.gz could not be read; the summary says why." in page.text


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    write_metrics(tmp_path, 20_000)
    assert len(page_of(tmp_path)[1]) < 600_000


def test_the_layout_without_a_trace(tmp_path: Path) -> None:
    write_metrics(tmp_path, 3)
    (tmp_path / "run_config.yaml").write_text(CONFIG)
    page, _ = page_of(tmp_path, "--gpus-per-node", "4")
    assert read_run(tmp_path).world_size == 8
    assert "PP: 4 groups of 2, all cross nodes, up to 2 nodes each; such as ranks 0,4" in page.text


def test_the_plan_of_a_run_whose_tokenizer_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "checkpoints"
    write_metrics(folder, 3)
    model = "num-layers: 2\nhidden-size: 16\nnum-attention-heads: 2\nseq-length: 8\nmicro-batch-size: 1\ncpu: true\n"
    tokenizer = "tokenizer-type: SentencePieceTokenizer\ntokenizer-model: gone.model\n# derived: vocab-size: 300\n"
    (folder / "run_config.yaml").write_text(CONFIG + model + tokenizer)
    found = read_run(folder)
    plan, why = computed_plan(found)
    assert why == "" and plan is not None and found.name == "a/checkpoints"
    assert [rank["pp_rank"] for rank in plan] == [0, 1] and all(rank["weights"] > 0 for rank in plan)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent is missing: there is no such file or folder"):
        main([str(tmp_path / "absent")])
    (tmp_path / "metrics").mkdir()
    with pytest.raises(ValueError, match="is a folder without a model, a run or text; name the --save folder"):
        main([str(tmp_path)])
    write_metrics(tmp_path / "a" / "checkpoints", 1)
    with pytest.raises(ValueError, match=f"did you mean {tmp_path}/a/checkpoints"):
        main([str(tmp_path / "a")])
    with pytest.raises(ValueError, match="is not a file that can be written"):
        main([str(tmp_path / "a" / "checkpoints"), "--no-plan", "--output", str(tmp_path)])


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason=f"needs a browser: one of {', '.join(BROWSERS)}")
def test_a_browser_shows_all_sections(run: Path, tmp_path: Path) -> None:
    """The page as the browser has built it: same sections and pictures, none without a size, nothing loaded."""
    page, _ = page_of(run)
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command = [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (run / "report.html").as_uri()]
    built = Page(run_command(command, code=0).stdout)
    assert sections_of(built) == SECTIONS
    assert {tag: count for tag, count in built.tags.items() if tag != "tbody"} == {
        tag: count for tag, count in page.tags.items() if tag != "tbody"
    }


def test_a_page_is_written_to_a_pipe(tmp_path: Path) -> None:
    def write(output: Path, folder: Path) -> None:
        write_metrics(folder, 2)
        assert report.main([str(folder), "--no-plan", "--output", str(output)]) == 0

    check_pipe(write, tmp_path)
