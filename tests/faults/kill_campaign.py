"""Kills a rank of a run again and again, and shows that no checkpoint is lost by it.

    python -m tests.faults.kill_campaign --kills 50 --seed 1
    python -m tests.faults.kill_campaign --kills 50 --change-strategy

Eight processes (TP2 PP2 DP2) run `pretrain_gpt.py` and save every other step in the background, keeping the last two.
At a random moment a random rank gets SIGKILL. The others go on for up to a second before they are killed too, or, one
time in eight, are left to notice it and end by themselves. The same command is then started again, until a run comes
to its end; new runs follow until there were as many kills as asked for. Of every run the final checkpoint and the
logged losses are compared, bit for bit, with those of a run that nobody disturbed.

With `--change-strategy` each start has the next --data-parallel-sharding-strategy, so that what one has saved another
loads, and one micro-batch a step, which leaves nothing for the strategies to round differently but the logged norm.

The ranks are forked instead of started by torchrun, which saves importing torch eight times a start; all else is the
program's own. One moment in ten counts from the fork on, to hit start-up and loading; the others from the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import Any

import torch

from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.parallel_state import Axis
from tests.forked import forked_ranks, join
from tests.limits import HANG
from tests.tiny import TINY
from tools import inspect_checkpoint

WORLD = 8
MODEL = (
    f"{TINY} --num-layers 4 --hidden-size 32 --seq-length 16 --vocab-size 64 --lr 1e-3 --log-interval 1 "
    "--save-interval 2 --keep-last 2 --tp 2 --pp 2"
).split()
ONE_MICROBATCH = "--micro-batch-size 2 --clip-grad 0"
STRATEGIES = tuple(
    f"{ONE_MICROBATCH} --data-parallel-sharding-strategy {name}".split()
    for name in ("optim_grads_params", "optim", "optim_grads", "no_shard")
)
LOGGED = ("iteration", "consumed_samples", "lm_loss", "grad_norm")


@dataclass(frozen=True)
class Moment:
    """When to kill whom, and what becomes of the others."""

    victim: int
    delay: float
    """Seconds after the first step, or after the fork with `early`."""

    early: bool
    others: float | None
    """Seconds until they are killed as well; None: they are left to end by themselves."""

    @classmethod
    def draw(cls, random: Random, longest: float) -> Moment:
        early = random.random() < 0.1
        delay = random.uniform(0, 2.0 if early else longest)
        others = None if random.random() < 1 / 8 else random.uniform(0, 1)
        return cls(random.randrange(WORLD), delay, early, others)


@dataclass
class Kill:
    """A kill, and what became of the run at the next start that loaded."""

    victim: int
    latest: int
    """Newest complete checkpoint just before it; 0: none."""

    resumed: int | None = None

    def __str__(self) -> str:
        return f"rank {self.victim} killed when the latest checkpoint was {self.latest}: resumed from {self.resumed}"


def start(folder: Path, iterations: int, moment: Moment | None, flags: Sequence[str] = ()) -> tuple[str, Kill | None]:
    """Starts the ranks on the run in `folder`, kills at `moment`, and returns what they printed when all are gone, and
    the kill; None if the run came to its end before.

    Raises RuntimeError if a start that nobody disturbed fails, TimeoutError if one hangs."""
    save, screen = folder / "save", folder / "screen"
    argv = [*MODEL, "--train-iters", str(iterations), "--save", str(save), "--load", str(save), *flags]
    with forked_ranks(WORLD, argv, screen) as ranks:
        if moment is None or not _reaches(moment, ranks, screen):
            codes = join(ranks)
            if any(codes):
                raise RuntimeError(f"exit codes {codes}:\n{screen.read_text()}")
            return screen.read_text(), None
        kill = Kill(moment.victim, read_latest(save) or 0)
        os.kill(ranks[moment.victim].pid, signal.SIGKILL)
        if moment.others is None:
            join(ranks)
        else:
            time.sleep(moment.others)
    return screen.read_text(), kill


def _reaches(moment: Moment, ranks: Sequence[Any], screen: Path) -> bool:
    """Waits for the moment; False if the run ends before."""
    began = time.monotonic()
    due = began + moment.delay if moment.early else None
    while due is None or time.monotonic() < due:
        if any(process.exitcode is not None for process in ranks):
            return False
        if time.monotonic() > began + HANG:
            raise TimeoutError(f"{WORLD} ranks did not come to a first step within {HANG} s")
        if due is None and " iteration " in screen.read_text():
            due = time.monotonic() + moment.delay
        time.sleep(0.005)
    return all(process.exitcode is None for process in ranks)


def loaded_by(text: str) -> int | None:
    """Iteration that a start went on from, 0 if from the beginning; None if it was killed before it said so."""
    if found := re.search(r"loaded checkpoint of iteration (\d+)", text):
        return int(found[1])
    return 0 if "starting at iteration 0" in text else None


def differences(save: Path, undisturbed: Path, keys: Sequence[str] = LOGGED) -> list[str]:
    """In what the ends of two runs differ: tensors, where they stand, and every logged loss. Exact."""
    found, problems = [], []
    for folder in (save, undisturbed):
        checkpoint = choose_checkpoint(folder, Axis(), problems.append)
        if checkpoint is None:
            return [f"{folder} holds no checkpoint"]
        found.append(checkpoint)
    problems += map(str, inspect_checkpoint.differences(*found))
    for key in ("iteration", "consumed_samples", "skipped_iterations", "data_fingerprint", "optimizer", "rng"):
        if found[0].payload[key] != found[1].payload[key]:
            problems.append(f"{key}: {found[0].payload[key]} and {found[1].payload[key]}")
    logs = [logged(folder / "metrics.jsonl", keys) for folder in (save, undisturbed)]
    problems += [f"logged: {one} and {two}" for one, two in zip(*logs, strict=False) if one != two][:3]
    if len(logs[0]) != len(logs[1]):
        problems.append(f"{len(logs[0])} and {len(logs[1])} logged iterations")
    left = sorted(path.name for path in save.iterdir() if path.suffix in (".tmp", ".old"))
    return problems + [f"left behind: {name}" for name in left]


def logged(path: Path, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [tuple(record[key] for key in keys) for record in records]


def campaign(
    kills: int,
    seed: int,
    iterations: int,
    folder: Path,
    say: Callable[[str], None] = print,
    share: float = 0.2,
    flags: Sequence[Sequence[str]] = ((),),
) -> tuple[list[Kill], list[str]]:
    """(the kills, what was wrong). `share`: a rank is killed in that part of the time that a whole run takes. `flags`:
    those of each start, in turn."""
    random, done, wrong, turns = Random(seed), list[Kill](), list[str](), cycle(flags)
    keys, undisturbed, began = LOGGED if len(flags) == 1 else LOGGED[:-1], folder / "undisturbed", time.monotonic()
    undisturbed.mkdir(parents=True)
    start(undisturbed, iterations, None, next(turns))
    longest = share * (time.monotonic() - began)
    for run in count(1):
        place = folder / f"run-{run}"
        place.mkdir()
        while True:
            moment = Moment.draw(random, longest) if len(done) < kills else None
            text, kill = start(place, iterations, moment, next(turns))
            wrong += [line for line in text.splitlines() if line.startswith("skipped checkpoint")]
            for each in done:
                if each.resumed is None and (resumed := loaded_by(text)) is not None:
                    each.resumed = resumed
                    say(str(each))
                    wrong += [f"lost: {each}"] if resumed < each.latest else []
            if kill is None:
                break
            done.append(kill)
        found = differences(place / "save", undisturbed / "save", keys)
        say(f"run {run}: " + ("; ".join(found) if found else "equal to the undisturbed run, bit for bit"))
        wrong += [f"run {run}: {problem}" for problem in found]
        if len(done) >= kills:
            break
    return done, wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the victims")
    parser.add_argument("--iterations", type=int, default=40, help="length of each run")
    parser.add_argument("--folder", type=Path, help="where to put the runs; default: a temporary folder")
    parser.add_argument("--change-strategy", action="store_true", help="another sharding strategy at each start")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    flags = STRATEGIES if args.change_strategy else ((),)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = args.folder or Path(name)
        kills, wrong = campaign(args.kills, args.seed, args.iterations, folder, flags=flags)
    print(f"{len(kills)} kills")
    print("\n".join(wrong) or "every kill: resumed from the newest complete checkpoint; every run: ended equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
