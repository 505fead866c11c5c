"""What the referee makes of faults that are planted into this program: dumps of runs with mutants, each judged.

    python -m tests.referee.planted                        all of them: a line each, and the counts
    python -m tests.referee.planted 'Sinks get no' Rotary  those whose names begin so

`planted.txt` has the mutants of tests/parity/mutants.py that change gradients and leave the loss, and for each the
first gradient of the backward pass that it spoils, a regular expression, as its edit says. A run with the mutant dumps
its first step, which `tools/referee.py --step` judges without the mutant. A verdict is wrong if it names another
gradient, and a fault is lost if all gradients are called equal. Runs that a fault ends are not dumps; they are counted.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.train_step import train_step
from tests.parity.matrix import settings
from tests.parity.mutants import MUTANTS, Mutant, planted
from tools import referee

EXPECTED = dict(
    line.rsplit(": ", 1) for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
)
"""Mutant -> regular expression of the first gradient that it spoils."""


WITHOUT_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def one_step(rank: int, world_size: int, config: RunConfig) -> None:
    with local_run(config, rank, world_size) as run:
        train_step(run)


def judged(mutant: Mutant | None, folder: Path, flags: Sequence[str], world_size: int) -> dict[str, object]:
    """The referee's judgement of the first step of a run."""
    dump = ["--dump-step", "1", "--dump-step-dir", str(folder / "step"), *WITHOUT_DROPOUT]
    config = resolve_legal(parse_args([*flags, *dump]), world_size)
    with planted(mutant) if mutant is not None else contextlib.nullcontext():
        run_world(world_size, one_step, config)
    judgement = folder / "judgement.json"
    with contextlib.redirect_stdout(io.StringIO()):
        referee.main(["--step", str(folder / "step"), "--json", str(judgement)])
    found: dict[str, object] = json.loads(judgement.read_text())
    return found


def verdict_of(name: str) -> tuple[str, str]:
    """("right", "wrong", "lost" or "no dump"; what is said) of a mutant."""
    mutant = MUTANTS[name]
    with settings(mutant.combination), tempfile.TemporaryDirectory() as folder:
        try:
            found = judged(mutant, Path(folder), mutant.combination.argv, mutant.combination.world_size)
        except (RuntimeError, TimeoutError, ValueError) as error:
            return "no dump", str(error).strip().splitlines()[-1][:100]
    if found["equal"]:
        return "lost", "all gradients are equal"
    first = str(found["first"])
    gradients: dict[str, dict[str, object]] = found["gradients"]  # type: ignore[assignment]
    said = f"{first} {gradients[first]['cause']}" if found["first"] else "the loss alone"
    return "right" if re.search(EXPECTED[name], first) else "wrong", said


def main(argv: Sequence[str] | None = None) -> int:
    chosen = tuple(sys.argv[1:] if argv is None else argv)
    counts = Counter[str]()
    for name in EXPECTED:
        if name in MUTANTS and (not chosen or name.startswith(chosen)):
            verdict, said = verdict_of(name)
            counts[verdict] += 1
            print(f"{verdict} | {name} | {said}", flush=True)
    print(f"{sum(counts.values())} faults: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    return 1 if counts["wrong"] or counts["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
