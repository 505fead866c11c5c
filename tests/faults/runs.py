"""Runs of four processes that a fault ends, and how long that takes.

python -m tests.faults.runs [KIND ...]      # prints the table of docs/reliability.md
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = (
    "--cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --global-batch-size 8 --train-iters 100000 --log-interval 1000 "
    "--eval-iters 0 --num-workers 0 --tp 2 --pp 2"
).split()
KINDS = {
    "exception": [],
    "in_a_forward": [],
    "out_of_memory": [],
    "exit_code_3": [],
    "segfault": [],
    "kill": [],
    "stop": ["--distributed-timeout-minutes", "0.1"],
    "slow": ["--distributed-timeout-minutes", "0.1"],
    "other_collective": ["--distributed-timeout-minutes", "0.1"],
    "terminate": [],
    "user_signal": [],
}
"""Fault -> the flags its run needs. The timeout of 6 s is the shortest that start-up bears on a loaded machine."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    code: int
    seconds: float
    """From the fault until the launcher and all its processes were gone."""

    screen: str
    left: list[int]
    """Processes of the run that were still there."""


def run_with_fault(kind: str, folder: Path, *flags: str, rank: int = 2, step: int = 3, processes: int = 4) -> Ended:
    """Starts `processes` ranks under torchrun and breaks one."""
    file = folder / "fault"
    environ = os.environ | {
        "FAULT": f"{kind}:{rank}:{step}",
        "FAULT_FILE": str(file),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, "tests/faults/broken_pretrain.py", *MODEL, "--save", str(folder / "save")]
    command += ["--load", str(folder / "save"), *KINDS[kind], *flags]
    with (folder / "screen").open("w+") as screen:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=screen, stderr=screen, timeout=200)
        ended = time.time()
        screen.seek(0)
        text = screen.read()
    began = float(file.read_text()) if file.exists() else ended
    return Ended(done.returncode, ended - began, text, processes_of(folder))


def processes_of(folder: Path) -> list[int]:
    """Living processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def main(kinds: list[str]) -> None:
    print("| fault on rank 2 of 4 | seconds until all processes were gone | launcher's code |\n|---|---|---|")
    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            ended = run_with_fault(kind, Path(folder))
            print(f"| `{kind}` | {ended.seconds:.1f} | {ended.code} |", flush=True)
            assert not ended.left, ended.left
            if os.environ.get("SHOW"):
                print(ended.screen, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
