"""Test the referee on faults that are planted in this program. For each mutant, the referee judges the step dump of a
run.

    python -m tests.referee.planted                        all mutants: one row each, and the counts
    python -m tests.referee.planted 'Sinks get no' Rotary  mutants whose names begin with these texts
    python -m tests.referee.planted --of 3 --part 0        every third mutant, from the first

`planted.txt` lists the mutants of tests/parity/mutants.py that change gradients but not the loss. For each mutant, a
regular expression matches the name of the first gradient in the backward pass that is wrong. A run with the mutant
dumps its first step, which `tools/referee.py --step` judges without the mutant. A verdict is wrong if it names a
different gradient. The referee misses a fault if it reports all gradients as equal. Runs that abort because of the
fault write no step dump and are counted separately. A fault is explained if the named cause, applied to the correct
tensor, gives the dumped tensor. Other causes only describe the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
"""Regular expression that matches the name of the first wrong gradient, keyed by the name of the mutant."""


WITHOUT_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def one_step(rank: int, world_size: int, config: RunConfig) -> None:
    with local_run(config, rank, world_size) as run:
        train_step(run)


def judged(mutant: Mutant | None, folder: Path, flags: Sequence[str], world_size: int) -> dict[str, object]:
    """Return the referee's judgement of the first step of a run. If `mutant` is None, no fault is planted in the
    run."""
    dump = ["--dump-step", "1", "--dump-step-dir", str(folder / "step"), *WITHOUT_DROPOUT]
    config = resolve_legal(parse_args([*flags, *dump]), world_size)
    with planted(mutant) if mutant is not None else contextlib.nullcontext():
        run_world(world_size, one_step, config)
    judgement = folder / "judgement.json"
    with contextlib.redirect_stdout(io.StringIO()):
        referee.main(["--step", str(folder / "step"), "--json", str(judgement)])
    found: dict[str, object] = json.loads(judgement.read_text())
    return found


class Found(NamedTuple):
    """The referee's verdict on a fault."""

    verdict: str
    """One of `VERDICTS`."""

    first: str
    """Name of the first wrong gradient according to the verdict, or the reason why the run wrote no step dump."""

    cause: str = ""
    explained: bool = False


VERDICTS = {
    "right": "name the gradient that the fault spoils first",
    "wrong": "name another gradient first",
    "lost": "are called equal",
    "no dump": "end the run, so that there is no dump",
}


def verdict_of(name: str) -> Found:
    """Return the referee's verdict on a mutant."""
    mutant = MUTANTS[name]
    with settings(mutant.combination), tempfile.TemporaryDirectory() as folder:
        try:
            found = judged(mutant, Path(folder), mutant.combination.argv, mutant.combination.world_size)
        except (RuntimeError, TimeoutError, ValueError) as error:
            return Found("no dump", str(error).strip().splitlines()[-1][:100])
    if found["equal"]:
        return Found("lost", "all gradients are equal")
    if not found["first"]:
        return Found("wrong", "the loss alone")
    first = str(found["first"])
    gradients: dict[str, dict[str, object]] = found["gradients"]  # type: ignore[assignment]
    row = gradients[first]
    verdict = "right" if re.search(EXPECTED[name], first) else "wrong"
    return Found(verdict, first, str(row["cause"]), bool(row["explained"]))


def summary(found: Sequence[Found]) -> Iterator[str]:
    """Yield the lines of a Markdown table that counts the verdicts."""
    counts = Counter(each.verdict for each in found)
    explained = sum(each.verdict == "right" and each.explained for each in found)
    yield f"| {len(found)} faults | number |"
    yield "| --- | --- |"
    for verdict, words in VERDICTS.items():
        yield f"| {words} | {counts[verdict]} |"
        if verdict == "right":
            yield f"| of these with the cause explained, not only described | {explained} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--part", type=int, default=0)
    args = parser.parse_args(argv)
    chosen = tuple(args.names)
    names = [name for name in EXPECTED if name in MUTANTS and (not chosen or name.startswith(chosen))]
    verdicts = []
    print("| fault | verdict | first gradient | difference |\n| --- | --- | --- | --- |", flush=True)
    for name in names[args.part :: args.of]:
        found = verdict_of(name)
        verdicts.append(found)
        mark = "" if found.explained or not found.cause else " (described)"
        print(f"| {name} | {found.verdict} | {found.first} | {found.cause}{mark} |", flush=True)
    print("", *summary(verdicts), sep="\n")
    return 1 if any(found.verdict in ("wrong", "lost") for found in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
