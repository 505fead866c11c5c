"""tools/bench/gpu_page.py: the page of a folder of figures, whole or not."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.apart import ROOT, run_command
from tools.bench.gpu import SHAPES, config_of, planner_tflops
from tools.bench.gpu_page import page, read_folder

SCRIPT = ROOT / "scripts/gpu_first_hour.sh"

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
PART = {"group": "attention", "name": "cudnn", "milliseconds": SPREAD, "tflop": 5.0, "gigabytes": 2.0, "failed": None}
VARIANT = {"contestant": "as it is", "result": SPREAD, "failed": None, "times": {}}
MACHINE = {"gpu": "NVIDIA H100", "python": "3.12", "versions": {"torch": "2.11.0"}}


def test_page_of_what_there_is(tmp_path: Path) -> None:
    def write(name: str, *rows: object) -> None:
        (tmp_path / name).write_text(json.dumps({"machine": MACHINE, "rows": rows}))

    assert list(page(read_folder(tmp_path), ()))[2] == "No figures."
    write("llama-bf16.json", RUN)
    write("micro.json", PART, PART | {"name": "flash3", "milliseconds": None, "failed": "ImportError: none"})
    failed = {"contestant": "--fp8-recipe rowwise", "failed": "RuntimeError: no | kernel", "times": {}}
    write("recipes.json", VARIANT, failed)
    (tmp_path / "headline-bf16.json").write_text('{"rows": [')
    (tmp_path / "tests.txt").write_text(
        "FAILED tests/gpu/test_fp8.py::test_a - AssertionError\n= 1 failed, 9 passed in 9s ="
    )
    text = "\n".join(page(read_folder(tmp_path), ["llama-fp8.json: layers"]))
    for line in (
        "NVIDIA H100; Python 3.12, torch 2.11.0",
        "| llama-bf16.json | NVIDIA H100 | llama-8b-layers bf16 | 8 | 8 x 1 | 10,000 (9,000 to 11,000) | 600.0 | 60.6% "
        "| 80.0% | 7.00 | 7.00 | 1.000 |",
        "| group | ms | share | kernels | longest |",
        "| GEMM | 200.00 | 80.0% | 9 | nvjet/a; b |",
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


def test_rates_of_another_device_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """device.yaml of a trial on CPU, or of another GPU."""
    h100 = ROOT / "megatron/extensions/planner/devices/h100.yaml"
    config = config_of(SHAPES["tiny"], 1, 1, "--bf16 --cpu")
    assert list(planner_tflops(config, [], h100, "NVIDIA H100 80GB HBM3")) == [str(h100)]
    assert capsys.readouterr().out == ""
    assert planner_tflops(config, [], h100, "NVIDIA H200") == {}
    assert "h100.yaml: it is of NVIDIA H100 80GB HBM3, and this is NVIDIA H200" in capsys.readouterr().out
    assert planner_tflops(config, [], ROOT / "none.yaml", "NVIDIA H200") == {}
    assert "none.yaml" in capsys.readouterr().out


TESTS = """
import os
import pytest

def test_passes():
    pass

@pytest.mark.parametrize("words", ["a b"])
def test_fails(words):
    assert words == "c"

@pytest.fixture
def broken():
    raise RuntimeError("no memory")

def test_with_broken(broken):
    pass

def test_killed():
    os._exit(9)
"""


def test_tests_that_are_killed_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "test_four.py").write_text(TESTS)
    flags = re.search(r'pytest "\$\{files\[@\]\}" .*? (-vv .*?)\n\n?    experts', SCRIPT.read_text(), re.DOTALL)
    assert flags is not None
    words = flags[1].replace("\\\n", " ").split()
    flags_of_pytest = ["-c", "pyproject.toml", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", str(tmp_path / "test_four.py"), *flags_of_pytest, *words]
    done = run_command(command, code=9)
    (tmp_path / "tests.txt").write_text(done.stdout)
    text = "\n".join(page(read_folder(tmp_path), ()))
    assert "The tests did not end: 1 passed, 1 failed, 1 error, 1 running." in text, done.stdout + text
    for line in (
        r"FAILED .*::test_fails\[a b\] - .*'a b' == 'c'",
        r"ERROR .*::test_with_broken - RuntimeError: no memory",
    ):
        assert re.search(rf"^- {line}$", text, re.MULTILINE), text
    assert re.search(r"^- running .*::test_killed$", text, re.MULTILINE)


def test_a_line_of_calls_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    call = {"part": "llama", "code": 143, "seconds": 9, "limit": 200, "stopped": True, "command": "python gpu.py"}
    (tmp_path / "calls.jsonl").write_text(
        f'{json.dumps(call)}\n\n{{"part": "headl\n{json.dumps(call | {"code": 0})}\n[]'
    )
    text = "\n".join(page(found := read_folder(tmp_path), ()))
    assert "| llama | **143**, stopped from outside | 9 of 200 | `python gpu.py` |" in text
    assert len(found.calls) == 2
    assert found.unreadable == [
        'calls.jsonl: line 3 is no whole command: {"part": "headl',
        "calls.jsonl: line 5 is no whole command: []",
    ]
