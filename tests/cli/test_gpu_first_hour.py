"""scripts/gpu_first_hour.sh and its page: a part as it runs without a GPU, and the commands of all parts, which a
program in python's place writes down."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.limits import HANG
from tools.bench.gpu import SHAPES, chosen_config, config_of, parser_of_args
from tools.bench.gpu_page import EXPECTED, page, read_folder

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/gpu_first_hour.sh"


def first_hour(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("OUT", "DEVICE", "SHARE")}
    environment |= {"PYTHON": python, "OMP_NUM_THREADS": "1"}
    command = ["bash", SCRIPT, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG)


def test_a_part_without_a_gpu(tmp_path: Path) -> None:
    done = first_hour("parts", str(tmp_path), "--cpu", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page.md").read_text()
    assert "| tiny.json | tiny bf16 | 2 | 2 x 2 |" in text and "## Where a step goes: tiny bf16" in text
    found = read_folder(tmp_path)
    assert {row["group"] for row in found.parts} == {"GEMM bf16", "GEMM fp8", "attention", "fp8", "regions", "memory"}
    assert not [row for row in found.parts if row["failed"]]
    assert "| regions | layer |" in text and "failed:" not in text
    assert "- headline-fp8.json: as many layers as fit, fp8" in text and "- micro.json" not in text
    assert "regions    layer" in (tmp_path / "parts.log").read_text()


@pytest.fixture
def commands(tmp_path: Path) -> list[list[str]]:
    """Of all parts, as they run on a GPU; pytest's output is made up."""
    python, log = tmp_path / "python", tmp_path / "commands"
    python.write_text(f'#!/usr/bin/env bash\nprintf "%q " "$@" >>{log}\necho >>{log}\n')
    python.chmod(0o755)
    done = first_hour("all", str(tmp_path / "out"), python=str(python))
    assert {line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith("failed: ")} <= {"failed"}
    assert all("nvidia-smi" in line for line in done.stdout.splitlines() if line.startswith("failed: "))
    return [shlex.split(line) for line in log.read_text().splitlines()]


def test_every_command_is_legal_and_fits(commands: list[list[str]]) -> None:
    """On a GPU with 78 GiB free."""
    models = [words[1:] for words in commands if words[0] == "tools/bench/gpu.py"]
    assert len(models) == 9
    for words in models:
        args = parser_of_args().parse_args(words)
        assert args.json.name in EXPECTED
        if args.layers is None and args.config == "llama-8b-layers":
            continue  # tests/cli/test_gpu_bench.py: as many as fit
        room = int(78 * 2**30 * args.memory_share / (1 + len(args.compare)))
        config, flags = chosen_config(args, room)
        of = config.model.num_layers, config.training.micro_batch_size
        for more in args.compare:
            config_of(SHAPES[args.config], *of, f"{flags} {more}")
    written = {Path(words[words.index("--json") + 1]).name for words in commands if "--json" in words}
    assert written | {"tests.txt", "device.yaml"} == set(EXPECTED)


def test_every_run_is_legal(commands: list[list[str]]) -> None:
    """Of pretrain_gpt.py: what has no measured run is tried once."""
    runs = [words for words in commands if "pretrain_gpt.py" in words]
    tried = set[str]()
    for words in runs:
        at, world = words.index("pretrain_gpt.py"), 2 if "torch.distributed.run" in words else 1
        config = resolve(parse_args(words[at + 1 :]), world)
        assert not validate(config, world), words
        tried |= set(words)
    assert {"optim_grads", "optim_grads_params", "--num-experts"} < tried
    assert {"--optimizer-cpu-offload", "--cpu-offloading", "--log-layer-stats", "--deterministic-mode"} < tried
    assert {"--optimizer-post-validation", "--trace", "muon"} < tried
    assert [words[0] for words in commands].count("tools/generate_text.py") == 1


def test_a_command_that_is_killed_is_named_and_the_others_run(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/usr/bin/env bash\n[[ "$*" == *muon* ]] && kill -KILL $$\nexit 0\n')
    python.chmod(0o755)
    for _ in range(2):  # a part that runs again replaces what it has said
        done = first_hour("features", str(out), python=str(python))
        assert done.returncode == 1 and done.stdout.count("failed: features: code 137 of ") == 1
    calls = read_folder(out).calls
    assert [call["code"] for call in calls].count(137) == 1 and len(calls) == 10
    assert calls[1]["command"].endswith("--prompt a some words --max-new-tokens 8")
    text = "\n".join(page(read_folder(out), (), ()))
    assert re.search(r"\| features \| \*\*137\*\* \| \d+ of 55 \| `.* muon` \|", text)
    assert text.count("| features | 0 |") == 9


def test_parts_take_less_than_ten_minutes() -> None:
    text = (ROOT / SCRIPT).read_text()
    parts = re.findall(
        r"^(parts|tests|calibrate|features|llama|models|headline)\(\) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
    )
    assert len(parts) == 7
    for name, body in parts:
        body = body.partition("else")[0]
        assert 0 < sum(map(int, re.findall(r"^ +(?:limited|measure) (\d+) ", body, re.MULTILINE))) < 590, name


def test_wrong_arguments() -> None:
    for arguments, message in (
        (
            ["nothing"],
            "usage: bash scripts/gpu_first_hour.sh wheels|predict|parts|tests|calibrate|llama|headline|models|",
        ),
        (["parts", "--gpu"], "unknown argument --gpu"),
        (["parts", "--cpu"], "--cpu is for trials: add --tiny"),
    ):
        done = first_hour(*arguments)
        assert done.returncode == 2 and message in done.stderr


SPREAD = {"median": 10_000.0, "low": 9_000.0, "high": 11_000.0, "rounds": 3}
RUN = {
    "config": "llama-8b-layers",
    "precision": "bf16",
    "layers": 8,
    "micro_batch_size": 1,
    "micro_batches": 8,
    "tokens_per_second": SPREAD,
    "tflops": 600.0,
    "mfu": 0.606,
    "of_products": 0.8,
    "planned": [4 * 2**30, 2 * 2**30, 2**30],
    "allocated": 7 * 2**30,
    "reserved": 8 * 2**30,
    "ceilings": [],
    "planner": {"h100": 625.0},
    "groups": [
        {"name": "GEMM", "microseconds": 2e5, "share": 0.8, "count": 9, "longest": ["nvjet|a", "b"]},
        {"name": "idle", "microseconds": 5e4, "share": 0.2, "count": 0, "longest": []},
    ],
}
NONE = {"groups": {}}
PREDICTED = {
    "config": "llama-8b-layers",
    "precision": "bf16",
    # 8 layers in 8 micro-batches: 64 x 3 + 8 x 3 + 24 ms, and 144 launches in place of 11. 400 tokens a micro-batch.
    "parts": {
        "layer": {
            "groups": {"GEMMs": {"us": 2000.0, "launches": 2}, "weight-gradient sums": {"us": 1000.0, "launches": 0}}
        },
        "layer, once a step": NONE,
        "micro-batch": {"groups": {"GEMMs": {"us": 3000.0, "launches": 1}}},
        "step": {"groups": {"optimizer": {"us": 24000.0, "launches": 8}}},
    },
    "predicted": {
        "layers": 1,
        "micro_batches": 1,
        "micro_batch_size": 1,
        "host_ms": 11.0,
        "step_ms": 30.0,
        "tokens_per_second": 40_000 / 3,
    },
}
PART = {"group": "attention", "name": "cudnn", "milliseconds": SPREAD, "tflop": 5.0, "gigabytes": 2.0, "failed": None}
MACHINE = {"gpu": "NVIDIA H100", "python": "3.12", "versions": {"torch": "2.11.0"}}


def test_page_of_what_there_is(tmp_path: Path) -> None:
    def write(name: str, *rows: object) -> None:
        (tmp_path / name).write_text(json.dumps({"machine": MACHINE, "rows": rows}))

    assert list(page(read_folder(tmp_path), (), ()))[2] == "No figures."
    write("llama-bf16.json", RUN)
    write("micro.json", PART, PART | {"name": "flash3", "milliseconds": None, "failed": "ImportError: none"})
    variant = {"variant": "as it is", "tokens_per_second": SPREAD}
    write("recipes.json", variant, {"variant": "--fp8-recipe rowwise", "failed": "RuntimeError: no | kernel"})
    (tmp_path / "headline-bf16.json").write_text('{"rows": [')
    (tmp_path / "tests.txt").write_text(
        "FAILED tests/gpu/test_fp8.py::test_a - AssertionError\n= 1 failed, 9 passed in 9s ="
    )
    text = "\n".join(page(read_folder(tmp_path), [PREDICTED], ["llama-fp8.json: layers"]))
    for line in (
        "NVIDIA H100; Python 3.12, torch 2.11.0",
        "| llama-bf16.json | llama-8b-layers bf16 | 8 | 8 x 1 | 10,000 (9,000 to 11,000) | 600.0 | 60.6% | 80.0% "
        "| 7.00 | 7.00 | 1.000 | 800.0 (0.75 x) |",
        "| group | ms | share | kernels | longest |",
        "| GEMM | 200.00 | 80.0% | 9 | nvjet/a; b |",
        "| GEMM | 200.00 | 216.00 |",
        "| idle | 50.00 | 0.00 |",
        "| optimizer | 0.00 | 24.00 |",
        "| step | 250.00 | 240.00 |",
        "| llama-bf16.json | h100 | 625 | 600 | 0.960 |",
        "| attention | cudnn | 10,000.000 (9,000.000 to 11,000.000) | 0.5 | 0 |",
        "| attention | flash3 | failed: ImportError: none |  |  |",
        "| as it is | 10,000 (9,000 to 11,000) | 1.000 |",
        "| --fp8-recipe rowwise | failed: RuntimeError: no / kernel |  |",
        "1 failed, 9 passed in 9s",
        "- FAILED tests/gpu/test_fp8.py::test_a - AssertionError",
        "- llama-fp8.json: layers",
    ):
        assert line in text, f"{line}\n\n{text}"
    assert "- headline-bf16.json: JSONDecodeError" in text
