"""Tests of scripts/gpu_first_hour.sh and its documentation page. The tests run one part of the script without a GPU. In
the other tests, a substitute for python records the commands of all parts instead of running them."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.apart import ROOT, run_command
from tests.limits import HANG, wait_for
from tools.bench.gpu import SHAPES, chosen_config, config_of, parser_of_args
from tools.bench.gpu_page import EXPECTED, page, read_folder

SCRIPT = ROOT / "scripts/gpu_first_hour.sh"


def environment_of(**variables: str) -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if key not in ("OUT", "DEVICE", "SHARE", "DEVICE_FILE")}
    # A bash function replaces `timeout`, because the time limits of the script apply to a GPU only.
    patient = {"BASH_FUNC_timeout%%": f'() {{ exec timeout "$1" {HANG} "${{@:3}}"; }}'}
    return ours | patient | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables


def first_hour(
    *arguments: str, cwd: Path = ROOT, script: Path = SCRIPT, **variables: str
) -> subprocess.CompletedProcess[str]:
    return run_command(["bash", script, *arguments], cwd=cwd, env=environment_of(**variables))


def stub(folder: Path, body: str) -> str:
    """Write an executable named `python` that runs the shell commands in `body`."""
    program = folder / "python"
    program.write_text(f"#!/usr/bin/env bash\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_a_part_runs_without_a_gpu(tmp_path: Path) -> None:
    done = first_hour("parts", str(tmp_path), "--cpu", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page.md").read_text()
    assert "| tiny.json | CPU | tiny bf16 | 2 | 2 x 2 |" in text and "## Where a step goes: tiny bf16" in text
    found = read_folder(tmp_path)
    parts = found.parts["micro.json"]
    groups = {row["group"] for row in parts}
    assert groups == {"GEMM bf16", "GEMM fp8", "attention", "experts", "layer", "memory"}
    assert not [row for row in parts if row["failed"]]
    assert "| layer | forward and backward |" in text and "failed:" not in text
    assert "- headline-fp8.json: as many layers as fit, fp8" in text and "- micro.json" not in text
    assert "layer      forward and backward" in (tmp_path / "parts.log").read_text()
    write_figures_of_a_gpu(tmp_path)
    text = "\n".join(page(read_folder(tmp_path), ["llama-fp8.json: layers"]))
    for line in (
        "NVIDIA H100; Python 3.12, torch 2.11.0",
        "| gpu.json | NVIDIA H100 | tiny bf16 | 8 | 2 x 2 | 10,000 (9,000 to 11,000) | 600.0 | 60.6% | 80.0% | 7.00 "
        "| 7.00 | 1.000 |",
        "| GEMM | 200.00 | 80.0% | 9 | nvjet/a; b |",
        "| gpu.json | h100 | 625 | 600 | 0.960 |",
        "| attention | cudnn | 10,000.000 (9,000.000 to 11,000.000) | 0.5 | 0 |",
        "| attention | flash3 | failed: ImportError: none |  |  |",
        "| as it is | 10,000 (9,000 to 11,000) | 1.000 |",
        "| --fp8-recipe rowwise | failed: RuntimeError: no / kernel |  |",
        "1 failed, 9 passed in 9s",
        "- FAILED tests/gpu/test_fp8.py::test_a - AssertionError",
        "- llama-fp8.json: layers",
        "- headline-bf16.json: JSONDecodeError",
    ):
        assert line in text, f"{line}\n\n{text}"


def write_figures_of_a_gpu(folder: Path) -> None:
    """Write files like those that the script writes on a GPU. To the results of the tiny model, add the values that can
    only be measured on a GPU. The other files contain rows of other measurements, a truncated JSON object, and the end
    of pytest's output."""
    (run,) = json.loads((folder / "tiny.json").read_text())["rows"]
    spread = {"median": 10_000.0, "low": 9_000.0, "high": 11_000.0, "rounds": 3}
    run |= {"layers": 8, "tokens_per_second": spread, "tflops": 600.0, "mfu": 0.606, "of_products": 0.8}
    run |= {"planned": [2**32, 2**31, 2**30], "allocated": 7 * 2**30, "planner": {"h100": 625.0}}
    run["groups"] = [{"name": "GEMM", "microseconds": 2e5, "share": 0.8, "count": 9, "longest": ["nvjet|a", "b"]}]
    part = {"group": "attention", "name": "cudnn", "milliseconds": spread, "tflop": 5.0, "gigabytes": 2.0}
    rows = [
        *(run, part, part | {"name": "flash3", "milliseconds": None, "failed": "ImportError: none"}),
        {"contestant": "as it is", "result": spread, "failed": None, "times": {}},
        {"contestant": "--fp8-recipe rowwise", "failed": "RuntimeError: no | kernel", "times": {}},
    ]
    machine = {"gpu": "NVIDIA H100", "python": "3.12", "versions": {"torch": "2.11.0"}}
    (folder / "gpu.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    (folder / "headline-bf16.json").write_text('{"rows": [')
    (folder / "tests.txt").write_text(
        "FAILED tests/gpu/test_fp8.py::test_a - AssertionError\n= 1 failed, 9 passed in 9s ="
    )


@dataclass(frozen=True)
class Recorded:
    """The python commands of all parts of scripts/gpu_first_hour.sh, recorded as they would run on a GPU."""

    out: Path
    words: list[list[str]]
    """Arguments of each python command."""

    def limit(self, *parts: str) -> int:
        """Return the total time limit of the given parts in seconds. The limit includes the time for writing the
        results page after each part."""
        calls = [call for call in read_folder(self.out).calls if call["part"] in parts]
        assert {call["part"] for call in calls} == set(parts)
        page_limit = re.search(r"^    limited (\d+) .* tools/bench/gpu_page.py", SCRIPT.read_text(), re.MULTILINE)
        assert page_limit is not None
        return sum(call["limit"] for call in calls) + len(parts) * int(page_limit[1])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    out, log = folder / "out", folder / "commands"
    done = first_hour("all", str(out), PYTHON=stub(folder, f'printf "%q " "$@" >>{log}\necho >>{log}'))
    assert all("nvidia-smi" in line for line in done.stdout.splitlines() if line.startswith("failed: ")), done.stdout
    return Recorded(out, [shlex.split(line) for line in log.read_text().splitlines()])


def test_every_command_is_valid_and_fits(recorded: Recorded) -> None:
    """The models of each command must fit on a GPU with 78 GiB of free memory."""
    models = [words[1:] for words in recorded.words if words[0] == "tools/bench/gpu.py"]
    assert len(models) == 9
    for words in models:
        args = parser_of_args().parse_args(words)
        assert args.json.name in EXPECTED
        if args.layers is None and args.config == "llama-8b-layers":
            continue  # The command itself chooses as many layers as fit (see test_gpu_bench.py).
        room = int(78 * 2**30 * args.memory_share / (1 + len(args.compare)))
        config, flags = chosen_config(args, room)
        of = config.model.num_layers, config.training.micro_batch_size
        for more in args.compare:
            config_of(SHAPES[args.config], *of, f"{flags} {more}")
    written = {Path(words[words.index("--json") + 1]).name for words in recorded.words if "--json" in words}
    assert written | {"nccl.txt", "tests.txt", "curves.jsonl", "device.yaml"} == set(EXPECTED)


def test_every_run_is_valid(recorded: Recorded) -> None:
    """The flags of every pretrain_gpt.py command are valid. The commands include each feature that no other part of the
    script measures."""
    runs = [words for words in recorded.words if "pretrain_gpt.py" in words]
    tried = set[str]()
    for words in runs:
        at, world = words.index("pretrain_gpt.py"), 2 if "torch.distributed.run" in words else 1
        config = resolve(parse_args(words[at + 1 :]), world)
        assert not validate(config, world), words
        tried |= set(words)
    assert {"optim_grads", "optim_grads_params", "--num-experts"} < tried
    assert {"--optimizer-cpu-offload", "--offload-weights", "--cpu-offloading"} < tried
    assert {"--log-layer-stats", "--deterministic-mode"} < tried
    assert {"--optimizer-post-validation", "--trace", "muon"} < tried
    assert [words[0] for words in recorded.words].count("tools/generate_text.py") == 1


def test_a_command_that_is_killed_is_named_and_the_others_run(tmp_path: Path) -> None:
    out, python = tmp_path / "out", stub(tmp_path, '[[ "$*" == *muon* ]] && kill -KILL $$\nexit 0')
    for _ in range(2):  # if a part runs again, its new measurements replace the old measurements
        done = first_hour("features", str(out), PYTHON=python)
        assert done.returncode == 1 and done.stdout.count("failed: features: code 137 of ") == 1
    calls = read_folder(out).calls
    assert [call["code"] for call in calls].count(137) == 1 and len(calls) == 11
    assert calls[1]["command"].endswith("--prompt a some words --max-new-tokens 8")
    text = "\n".join(page(read_folder(out), ()))
    assert re.search(r"\| features \| \*\*137\*\* \| \d+ of 47 \| `.* muon` \|", text)
    assert text.count("| features | 0 |") == 10


RUNS_FOR_EVER = """
[[ "$1" == tools/bench/gpu_page.py ]] && exec {python} "$@"
sleep 100000 &
echo $! >{pid}.new
mv {pid}.new {pid}
wait
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_command_and_writes_the_page(tmp_path: Path, number: signal.Signals) -> None:
    out, pid = tmp_path / "out", tmp_path / "pid"
    python = stub(tmp_path, RUNS_FOR_EVER.format(python=sys.executable, pid=pid))
    command = ["env", "--default-signal", "bash", str(SCRIPT), "llama", str(out)]
    process = subprocess.Popen(command, env=environment_of(PYTHON=python), stdout=subprocess.DEVNULL)
    wait_for(pid.exists)
    process.send_signal(number)
    code, left = process.wait(HANG), alive(int(pid.read_text()))
    if left:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert code == 128 + number and not left
    (call,) = read_folder(out).calls
    assert call["code"] == 128 + number and call["stopped"] and "llama-bf16.json" in call["command"]
    assert f"| llama | **{128 + number}**, stopped from outside |" in (out / "page.md").read_text()


def alive(pid: int) -> bool:
    """Return True if a process is alive. A zombie process does not count as alive, because its parent may never reap
    it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_first_half_hour_includes_the_headline(recorded: Recorded) -> None:
    """The minutes that the script and the documentation state must agree with the time limits of the commands. The
    first parts must fit into 30 minutes of GPU time."""
    documented = (ROOT / "docs/performance.md").read_text()
    first, rest = ("tests", "llama", "headline"), ("curve", "calibrate", "parts", "models", "features")
    all_parts = ("nccl", *first, *rest)
    order = [call["part"] for call in read_folder(recorded.out).calls]
    assert tuple(dict.fromkeys(order)) == all_parts
    nccl, minutes, whole = (math.ceil(recorded.limit(*parts) / 60) for parts in (("nccl",), first, all_parts))
    assert all(recorded.limit(part) <= 590 for part in all_parts)
    assert minutes <= 28  # the rest of the 30 minutes is needed to start the machine and to send the commands
    assert (
        f"`nccl` takes at most {nccl} minutes, the next three parts at most {minutes} minutes, and all parts together "
        f"at most {whole} minutes." in " ".join(documented.split())
    )
    words = " ".join(SCRIPT.read_text().replace("#", "").split())
    promised = f"in at most {whole} minutes; nccl takes at most {nccl}, the next three at most {minutes} bash"
    assert f"one after another, {promised}" in words
    rows = re.findall(r"^\| `(\w+)` \| .*\|$", documented.partition("| part | commands |")[2], re.MULTILINE)
    assert tuple(rows[:9]) == all_parts


CALIBRATES = """
[[ "$1" == tools/calibrate.py ]] && echo rates >"$3"
printf "%q " "$@" >>{log}
echo >>{log}
"""


def test_later_parts_read_the_device_file(tmp_path: Path) -> None:
    """Later parts read the device file that an earlier part wrote to FOLDER. If FOLDER is emptied between the parts,
    DEVICE_FILE names the file to read."""
    out, kept, log = tmp_path / "out", tmp_path / "kept.yaml", tmp_path / "log"
    python = stub(tmp_path, CALIBRATES.format(log=log))
    for variables in ({}, {"DEVICE_FILE": "kept.yaml"}):
        for part in ("calibrate", "models"):
            assert first_hour(part, str(out), cwd=tmp_path, PYTHON=python, **variables).returncode == 0
            if variables:
                (out / "device.yaml").unlink(missing_ok=True)
    assert kept.read_text() == "rates\n"
    models = [shlex.split(line) for line in log.read_text().splitlines() if "gpu.py" in line]
    named = [words[words.index("--calibrated") + 1] for words in models]
    assert named == [str(out / "device.yaml")] * 3 + [str(kept)] * 3
    assert parser_of_args().parse_args(models[0][1:]).calibrated == out / "device.yaml"
