"""Runs of four processes that a fault ends, and how long that takes.

python -m tests.faults.runs --table [KIND ...]      # prints a table of the outcomes
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
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
KINDS = {
    "in_a_forward": ("an exception in a forward", ()),
    "exception": ("an exception between two steps", ()),
    "system_exit": ("`sys.exit(3)`", ()),
    "exit_code_3": ("`os._exit(3)`", ()),
    "segfault": ("a segmentation fault", ()),
    "kill": ("SIGKILL, as the kernel's out-of-memory killer sends it", ()),
    "out_of_memory": ("no device memory: `torch.OutOfMemoryError`", ()),
    "no_host_memory": ("no host memory: `RLIMIT_AS`", ()),
    "data_end": ("the data is at its end", ()),
    "not_a_number": ("a weight that is NaN", ()),
    "stop": ("SIGSTOP, with a timeout of 6 s", TIMEOUT),
    "slow": ("a sleep, with a timeout of 6 s", TIMEOUT),
    "other_collective": ("a barrier where the others go on, with a timeout of 6 s", TIMEOUT),
    "other_size": ("an all-reduce of another size, with a timeout of 6 s", TIMEOUT),
    "terminate": ("SIGTERM: saved and ended", ()),
    "user_signal": ("SIGUSR1: saved and ended", ()),
}
"""Fault -> what it is, and the flags its run needs."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    code: int
    seconds: float
    """From the fault until the launcher and all its processes were gone."""

    screen: str
    left: list[int]
    """Processes of the run that were still there."""


def run_with_fault(
    kind: str, folder: Path, *flags: str, rank: int = 2, step: int = 3, processes: int = 4, max_restarts: int = 0
) -> Ended:
    """Starts `processes` ranks under torchrun and breaks one; once only, if torchrun may start them again."""
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
    command += ["--load", str(folder / "save"), *KINDS[kind][1], *flags]
    with (folder / "screen").open("w+") as screen:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=screen, stderr=screen, timeout=HANG)
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


def report_of(screen: str) -> list[str]:
    """The last report on a screen: who, phase, the line of the error, what to do; or how the run was stopped."""
    lines = [line.strip().removeprefix("traceback : ") for line in screen.splitlines()]
    heads = [number for number, line in enumerate(lines) if line.startswith(("RUN FAILED", "This configuration"))]
    if not heads:
        return [line for line in lines if line.startswith("exiting at iteration")][-1:]
    report = lines[heads[-1] :]
    if report[0].startswith("This"):
        return report[:2]
    places = [number for number, line in enumerate(report) if re.match(r"ranks? [\d, ]+: ", line)]
    advice = next(line for line in report if line.startswith("what to do: "))
    what = report[2 : places[0] if places else report.index(advice)]
    raised = [line for line in what if re.match(r"[\w.]*(Error|Exit|Interrupt)\b", line)]
    error = raised[-1] if what[0].startswith("Traceback") and raised else what[0]
    return [report[0], report[1], error, advice]


def main(arguments: list[str]) -> None:
    kinds = [argument for argument in arguments if argument != "--table"] or list(KINDS)
    print("| fault of rank 2 | seconds | the last lines on the screen |\n|---|---|---|")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            ended = run_with_fault(kind, Path(folder))
            assert not ended.left, ended.left
            said = "<br>".join(
                line.replace(folder, "FOLDER").replace("|", "\\|") for line in report_of(ended.screen)[:3]
            )
            print(f"| {KINDS[kind][0]} | {ended.seconds:.1f} | {said} |", flush=True)
            if os.environ.get("SHOW"):
                print(ended.screen, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
