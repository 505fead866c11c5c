"""Run test programs that touch CUDA in separate processes, so that other tests can still fork."""

from __future__ import annotations

import torch

from tests.apart import python_apart


def multiplies_in_fp8() -> bool:
    """Return True if there is a GPU that supports fp8 GEMMs."""
    if torch.cuda.device_count() == 0:
        return False
    ask = "import torch; print(torch.cuda.get_device_capability() >= (8, 9))"
    return python_apart("-c", ask).stdout == "True\n"


def assert_agrees(program: str) -> None:
    """Run Python code in a separate process, and assert that the process succeeds and that its output ends with
    "agree"."""
    done = python_apart("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("agree\n")
