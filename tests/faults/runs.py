"""Run several processes that end because of a fault, and measure the time until all processes have exited."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.limits import HANG
from tests.tiny import TINY

ROOT = Path(__file__).parents[2]
MODEL = (
    f"{TINY} --num-layers 4 --hidden-size 32 --seq-length 16 --vocab-size 64 --lr 1e-3 --global-batch-size 8 "
    "--train-iters 100000 --log-interval 1000 --tp 2 --pp 2"
).split()
TIMEOUT = ("--distributed-timeout-minutes", "0.1")
HANGS = ("stop", "slow", "other_collective", "other_size")
"""Faults that make ranks wait for each other until a collective times out."""


@dataclass(frozen=True)
class Ended:
    """Result of a finished run."""

    code: int
    seconds: float
    """Seconds from the fault until the launcher and all its processes ended."""

    screen: str
    left: list[int]
    """Processes of the run that were still running after the launcher ended."""


def run_with_fault(
    kind: str, folder: Path, *flags: str, rank: int = 2, step: int = 3, processes: int = 4, max_restarts: int = 0
) -> Ended:
    """Launch `processes` ranks under torchrun, and inject a fault into one rank. If torchrun may restart the ranks, the
    fault strikes only once."""
    file = folder / "fault"
    environ = os.environ | {
        "FAULT": f"{kind}:{rank}:{step}",
        "FAULT_FILE": str(file),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environ |= {"FAULT_ONCE": "1"} if max_restarts else {}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launcher.append(f"--max-restarts={max_restarts}")
    command = [*launcher, "tests/faults/broken_pretrain.py", *MODEL, "--save", str(folder / "save")]
    command += ["--load", str(folder / "save"), *(TIMEOUT if kind in HANGS else ()), *flags]
    with (folder / "screen").open("w+") as screen:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=screen, stderr=screen, timeout=HANG)
        ended = time.time()
        screen.seek(0)
        text = screen.read()
    began = float(file.read_text()) if file.exists() else ended
    return Ended(done.returncode, ended - began, text, processes_of(folder))


def processes_of(folder: Path) -> list[int]:
    """Return the ids of all running processes whose command line contains the path of a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
