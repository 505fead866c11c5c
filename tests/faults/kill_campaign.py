"""Kills a rank of a run again and again, and shows that no checkpoint is lost by it.

    python -m tests.faults.kill_campaign --kills 50 --seed 1
    python -m tests.faults.kill_campaign --kills 50 --change-strategy

Eight processes (TP2 PP2 DP2) run `pretrain_gpt.py` and save every other step in the background, keeping the last two.
At a random moment a random rank gets SIGKILL. The others go on for up to a second before they are killed too, or, one
time in eight, are left to notice it and end by themselves. The same command is then started again, until a run comes
to its end; new runs follow until there were as many kills as asked for. Of every kill a line tells what it hit. Of
every run the final checkpoint and the logged losses are compared, bit for bit, with those of a run that nobody
disturbed.

With `--change-strategy` each start has the next --data-parallel-sharding-strategy, so that what one has saved another
loads, and one micro-batch a step, which leaves nothing for the strategies to round differently but the logged norm.

The ranks are forked instead of started by torchrun, which saves importing torch eight times a start; all else is the
program's own. One moment in ten counts from the fork on, to hit start-up and loading; the others from the first step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import torch

from megatron.core.dist_checkpointing import async_saver as saver
from megatron.core.dist_checkpointing import path_kind, storage
from megatron.core.dist_checkpointing.async_saver import HostStaging
from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.parallel_state import Axis
from megatron.training import checkpointing, training
from tests.forked import forked_ranks, join
from tests.limits import HANG
from tools import inspect_checkpoint

WORLD = 8
MODEL = (
    "--cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --global-batch-size 4 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--save-interval 2 --keep-last 2 --tp 2 --pp 2"
).split()
ONE_MICROBATCH = "--micro-batch-size 2 --clip-grad 0"
STRATEGIES = tuple(
    f"{ONE_MICROBATCH} --data-parallel-sharding-strategy {name}".split()
    for name in ("optim_grads_params", "optim", "optim_grads", "no_shard")
)
PHASES = ("between saves", "copying", "clearing", "writing", "publishing", "deleting", "loading")


class Marks:
    """What every rank is doing, in memory that the parent shares: its step, and its phase of a save."""

    def __init__(self) -> None:
        self.steps, self.phases = (mp.get_context("fork").RawArray("i", WORLD) for _ in range(2))

    def install(self, rank: int) -> None:
        """Has the functions of this process leave marks."""

        def marked(phase: str, fn: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                before, self.phases[rank] = self.phases[rank], PHASES.index(phase)
                try:
                    return fn(*args, **kwargs)
                finally:
                    self.phases[rank] = before

            return wrapped

        HostStaging.stage = marked("copying", HostStaging.stage)  # type: ignore[method-assign]
        storage._clear = marked("clearing", storage._clear)
        storage._publish = marked("publishing", storage._publish)
        saver.save = marked("writing", saver.save)
        saver.retain = marked("deleting", saver.retain)
        checkpointing.choose_checkpoint = marked("loading", checkpointing.choose_checkpoint)
        step = training.train_step

        def train_step(run: Any, *args: Any, **kwargs: Any) -> None:
            self.steps[rank] = run.progress.iteration + 1
            step(run, *args, **kwargs)

        training.train_step = train_step


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


@dataclass(frozen=True)
class Started:
    """One start of the program, and how it ended."""

    killed: bool
    """False: it came to the end of the run before its moment."""

    screen: str
    after: float
    """Seconds from the fork until the kill."""

    step: int = 0
    phase: str = ""
    latest: int | None = None
    """What the text file named just before the kill."""

    @property
    def loaded(self) -> int | None:
        """Iteration it went on from, 0 if from the beginning; None if it was killed before it said so."""
        if found := re.search(r"loaded checkpoint of iteration (\d+)", self.screen):
            return int(found[1])
        return 0 if "starting at iteration 0" in self.screen else None


def start(folder: Path, iterations: int, moment: Moment | None, flags: Sequence[str] = ()) -> Started:
    """Starts the ranks on the run in `folder`, kills at `moment`, and returns when all are gone.

    Raises RuntimeError if a start that nobody disturbed fails, TimeoutError if one hangs."""
    save, marks, screen = folder / "save", Marks(), folder / "screen"
    argv = [*MODEL, "--train-iters", str(iterations), "--save", str(save), "--load", str(save), *flags]
    began = time.monotonic()
    with forked_ranks(WORLD, argv, screen, marks.install) as ranks:
        if moment is None or not _reaches(moment, ranks, marks, began):
            codes, text = join(ranks), screen.read_text()
            if any(codes):
                raise RuntimeError(f"exit codes {codes}:\n{text}")
            return Started(False, text, time.monotonic() - began)
        latest = read_latest(save)
        pid = ranks[moment.victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        after = time.monotonic() - began
        step, phase = marks.steps[moment.victim], PHASES[marks.phases[moment.victim]]
        if moment.others is None:
            join(ranks)
        else:
            time.sleep(moment.others)
    return Started(True, screen.read_text(), after, step, phase if step else f"start-up, {phase}", latest)


def _reaches(moment: Moment, ranks: Sequence[Any], marks: Marks, began: float) -> bool:
    """Waits for the moment; False if the run ends before."""
    due = began + moment.delay if moment.early else None
    while due is None or time.monotonic() < due:
        if any(process.exitcode is not None for process in ranks):
            return False
        if time.monotonic() > began + HANG:
            raise TimeoutError(f"{WORLD} ranks did not come to a first step within {HANG} s")
        if due is None and all(marks.steps):
            due = time.monotonic() + moment.delay
        time.sleep(0.001)
    return all(process.exitcode is None for process in ranks)


def read_latest(save: Path) -> int | None:
    path = save / path_kind.LATEST
    return int(path.read_text()) if path.exists() else None


LOGGED = ("iteration", "consumed_samples", "lm_loss", "grad_norm")


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


@dataclass(frozen=True)
class Kill:
    """A kill, and what became of the run at the next start that loaded."""

    number: int
    run: int
    moment: Moment
    hit: Started
    resumed: int | None = None

    @property
    def lost(self) -> bool:
        """Whether the next start went on from less than what was complete before the kill."""
        return self.resumed is not None and self.resumed < (self.hit.latest or 0)

    def __str__(self) -> str:
        ended = "ended by themselves" if self.moment.others is None else f"lived {self.moment.others:.2f} s longer"
        latest = "no checkpoint" if self.hit.latest is None else f"latest {self.hit.latest}"
        resumed = "killed again before it had loaded" if self.resumed is None else f"resumed from {self.resumed}"
        return (
            f"kill {self.number:3d}: run {self.run}, {self.hit.after:5.2f} s, rank {self.moment.victim}, "
            f"step {self.hit.step:3d}, {self.hit.phase}, {latest}, others {ended}: {resumed}"
            + (" LOST" if self.lost else "")
        )


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
    random, done, wrong, run, turns = Random(seed), list[Kill](), list[str](), 0, cycle(flags)
    keys = LOGGED if len(flags) == 1 else LOGGED[:-1]
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir(parents=True)
    whole = start(undisturbed, iterations, None, next(turns)).after
    say(f"undisturbed: {whole:.1f} s for {iterations} iterations")
    while len(done) < kills:
        run += 1
        place = folder / f"run-{run}"
        place.mkdir()
        open_kills: list[Kill] = []
        while True:
            moment = Moment.draw(random, share * whole) if len(done) < kills else None
            started = start(place, iterations, moment, next(turns))
            wrong += [line for line in started.screen.splitlines() if line.startswith("skipped checkpoint")]
            if started.loaded is not None or not started.killed:
                for kill in open_kills:
                    resolved = replace(kill, resumed=started.loaded)
                    done[kill.number - 1] = resolved
                    say(str(resolved))
                    wrong += [f"lost: {resolved}"] if resolved.lost else []
                open_kills = []
            if not started.killed:
                break
            assert moment is not None
            open_kills.append(Kill(len(done) + 1, run, moment, started))
            done.append(open_kills[-1])
        found = differences(place / "save", undisturbed / "save", keys)
        say(f"run {run}: " + ("; ".join(found) if found else "equal to the undisturbed run, bit for bit"))
        wrong += [f"run {run}: {problem}" for problem in found]
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
    began = time.monotonic()
    place: AbstractContextManager[Any] = tempfile.TemporaryDirectory(prefix="kills-")
    with place as name:
        kills, wrong = campaign(
            args.kills,
            args.seed,
            args.iterations,
            args.folder or Path(name),
            lambda line: print(line, flush=True),
            flags=STRATEGIES if args.change_strategy else ((),),
        )
    phases = Counter(kill.hit.phase for kill in kills)
    print(
        f"{len(kills)} kills in {time.monotonic() - began:.0f} s: " + ", ".join(f"{n} {p}" for p, n in phases.items())
    )
    print("\n".join(wrong) or "every kill: resumed from the newest complete checkpoint; every run: ended equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
