"""Seconds until something happens: an import, the help text, the first step of a tiny model in two processes.

    python tools/bench/startup.py --rounds 5

Every figure is of a fresh interpreter, beside two that nobody can be faster than: an interpreter that does nothing and
one that imports torch. The commands take turns. The phases of start-up are those that a run prints itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import Spread, bench_parser, machine, write_json

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 512 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --eval-iters 0 --lr 1e-3 "
    "--mock-data --cpu --log-interval 1"
).split()
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PLANS = "import megatron.training.config.validation, megatron.extensions.planner.memory"
FIRST_STEP, FIRST_LINE = "first step, 2 processes", r"iteration +1/"
COMMANDS: dict[str, list[str]] = {
    "an empty interpreter": [PYTHON, "-c", "pass"],
    "import torch": [PYTHON, "-c", "import torch"],
    "import megatron": [PYTHON, "-c", "import megatron"],
    "plan and validate, no torch": [PYTHON, "-c", PLANS],
    "pretrain_gpt.py --help": [PYTHON, "pretrain_gpt.py", "--help"],
    "pretrain_gpt.py --dry-run": [PYTHON, "pretrain_gpt.py", *TINY, "--dry-run", "--world-size", "2"],
    FIRST_STEP: [*TORCHRUN, "pretrain_gpt.py", *TINY],
}


def seconds_of(command: Sequence[str], until: str | None = None, folder: Path = ROOT) -> tuple[float, str]:
    """Wall time until a line with `until` comes, or until the end; and the output up to there."""
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    start = time.perf_counter()
    lines = []
    taken = None
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if until is not None and taken is None and re.search(until, line):
                taken = time.perf_counter() - start
    if process.returncode or (until is not None and taken is None):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines[-20:])}")
    return taken if taken is not None else time.perf_counter() - start, "".join(lines)


def phases_of(output: str) -> dict[str, float]:
    """Of the line that a run prints once training begins."""
    line = re.search(r"start-up \(s\): (.*)", output)
    if line is None:
        return {}
    return {name: float(value) for name, value in re.findall(r"(?:^|\| )([a-z -]+?) ([\d.]+)", line.group(1))}


def main(argv: Sequence[str] | None = None) -> int:
    args = bench_parser(__doc__, 5).parse_args(argv)
    facts = machine()
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for what, command in COMMANDS.items():
            taken, output = seconds_of(command, FIRST_LINE if what == FIRST_STEP else None)
            found.setdefault(what, []).append(taken)
            for name, seconds in phases_of(output).items():
                found.setdefault(f"  of it {name}", []).append(seconds)
    spreads = {what: Spread.of(values) for what, values in found.items()}
    for what, spread in spreads.items():
        print(f"{what:<32} {spread:6.2f} s")
    write_json(args.json, facts, [{"what": what, "seconds": vars(spread)} for what, spread in spreads.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
