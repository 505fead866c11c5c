"""Programs of tests that touch CUDA, each in a process of its own, so that the others can fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.limits import HANG

ROOT = Path(__file__).parents[2]


def multiplies_in_fp8() -> bool:
    """Whether there is a GPU with products of fp8."""
    if torch.cuda.device_count() == 0:
        return False
    ask = "import torch; print(torch.cuda.get_device_capability() >= (8, 9))"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "True\n"


def assert_agrees(program: str) -> None:
    """Runs a program, which prints "agree" at its end."""
    folders = [
        str(ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("agree\n")
