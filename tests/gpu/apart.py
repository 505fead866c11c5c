"""Programs of tests that touch CUDA, each in a process of its own, so that the others can fork."""

from __future__ import annotations

import torch

from tests.apart import python_apart


def multiplies_in_fp8() -> bool:
    """Whether there is a GPU with products of fp8."""
    if torch.cuda.device_count() == 0:
        return False
    ask = "import torch; print(torch.cuda.get_device_capability() >= (8, 9))"
    return python_apart("-c", ask).stdout == "True\n"


def assert_agrees(program: str) -> None:
    """Runs a program, which prints "agree" at its end."""
    done = python_apart("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("agree\n")
