"""tools/bench/gpu_page.py generates a page from a folder of measurements. Some measurements may be missing."""

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


def test_rates_of_another_device_are_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    """The folder's device.yaml may have been measured on a CPU or on a different GPU."""
    h100 = ROOT / "megatron/extensions/plan/planner/devices/h100.yaml"
    config = config_of(SHAPES["tiny"], 1, 1, "--bf16 --cpu")
    assert list(planner_tflops(config, [], h100, "NVIDIA H100 80GB HBM3")) == [str(h100)]
    assert capsys.readouterr().out == ""
    assert planner_tflops(config, [], h100, "NVIDIA H200") == {}
    assert "h100.yaml: it describes NVIDIA H100 80GB HBM3, and this device is NVIDIA H200" in capsys.readouterr().out
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


def test_a_truncated_line_of_calls_is_omitted(tmp_path: Path) -> None:
    call = {"part": "llama", "code": 143, "seconds": 9, "limit": 200, "stopped": True, "command": "python gpu.py"}
    (tmp_path / "calls.jsonl").write_text(
        f'{json.dumps(call)}\n\n{{"part": "headl\n{json.dumps(call | {"code": 0})}\n[]'
    )
    text = "\n".join(page(found := read_folder(tmp_path), ()))
    assert "No figures." in text and "| llama | **143**, stopped from outside | 9 of 200 | `python gpu.py` |" in text
    assert len(found.calls) == 2
    assert found.unreadable == [
        'calls.jsonl: line 3 is not a complete record: {"part": "headl',
        "calls.jsonl: line 5 is not a complete record: []",
    ]
