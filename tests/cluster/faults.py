"""Inject faults into runs of scripts/train_gpt_elastic.sh on simulated hosts. The hosts must name each fault, and the
run must continue without losing steps.

python -m tests.cluster.faults [NAME ...]             # named faults, each in a separate box
python -m tests.cluster.faults --random 20 --seed 1   # random faults, one after another, in one long run
python -m tests.cluster.faults --random 20 --seed 1 --hosts 3 --ranks 2 --tp 2

Two times are measured from the moment of the fault: the time until each host has named the fault in its output, and the
time until the restarted run has logged a step. Then the fault is repaired, and all hosts must join the run again. At
the end, the losses and gradient norms of all iterations must equal the losses and gradient norms of an undisturbed
one-process run. The logs of a failed run are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import ROOT, Box, Process, hosts, missing

MODEL = (
    "--cpu --fp64 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --lr-warmup-iters 10 --micro-batch-size 2 --global-batch-size 12 "
    "--train-iters 100000 --log-interval 1 --eval-iters 0 --num-workers 0 --hidden-dropout 0.1 --save-interval 10 "
    "--keep-last 3"
).split()
RATE = "1gbit"
PATIENCE = 240.0
"""Seconds without output from any host after which a run is considered to be hanging. The value is many times the
duration of a step on an idle machine."""

LONGEST = 1800.0
"""Seconds after which a run that prints output but does not reach the expected state is considered to have failed."""

NAMING = re.compile(r"^(?:RUN FAILED: .*|ended because .*|torch\S*Rendezvous\w*Error: .*)", re.MULTILINE)
STEP = re.compile(r" iteration +(\d+)/")
RECOVERED = re.compile(r"recovered by .*", re.MULTILINE)
WORLD = re.compile(r"layout: (\d+) rank")


@dataclass(frozen=True)
class Fault:
    """A fault on one host."""

    name: str
    text: str
    strike: Callable[[Box, int], None]
    host: int = 1
    hold: str = ""
    """Point in the program at which the run pauses until the fault is injected (see `broken_pretrain`)."""

    harmless: bool = False
    """True if the fault must not cause a restart of the run."""

    early: bool = False
    """True if the fault is injected during a rendezvous of the hosts."""


FAULTS = [
    Fault("pull", "a cable pulled in a step", Box.pull_cable),
    Fault("pull-in-save", "a cable pulled in a save", Box.pull_cable, hold="publish"),
    Fault("pull-at-rendezvous", "a cable pulled while the hosts meet", Box.pull_cable, early=True),
    Fault("pull-at-start", "a cable pulled while data are built", Box.pull_cable, hold="data"),
    Fault("kill", "a host killed", Box.kill_host),
    Fault("mute", "what a host sends is lost", lambda box, host: box.one_way(host, "out")),
    Fault("deaf", "what a host should receive is lost", lambda box, host: box.one_way(host, "in")),
    Fault("slow", "a link at 1 % of its rate", lambda box, host: box.set_rate(host, "10mbit"), harmless=True),
    Fault("pull-rendezvous-host", "the cable of the rendezvous host pulled", Box.pull_cable, host=0),
    Fault("kill-rendezvous-host", "the rendezvous host killed", Box.kill_host, host=0),
    Fault("mute-rendezvous-host", "what it sends is lost", lambda box, host: box.one_way(host, "out"), host=0),
]


@dataclass
class Run:
    """Training run on all hosts of a simulated cluster (`tests.cluster.hosts.Box`). Each host runs
    scripts/train_gpt_elastic.sh."""

    box: Box
    ranks: int
    folder: Path
    flags: Sequence[str]
    environ: dict[str, str]
    scripts: dict[int, Process] = field(default_factory=dict)

    def start(self, host: int) -> None:
        environ = {"HOSTS": " ".join(self.box.names), "GPUS_PER_NODE": str(self.ranks), "PYTHON": sys.executable}
        command = ["bash", "scripts/train_gpt_elastic.sh", "tests/faults/broken_pretrain.py", *MODEL, *self.flags]
        command += ["--save", self.save, "--load", self.save]
        log = self.folder / f"{self.box.names[host]}.log"
        self.scripts[host] = self.box.start(host, command, log, **environ, **self.environ)

    @property
    def save(self) -> Path:
        return self.folder / "save"

    @property
    def held(self) -> Path:
        return self.folder / "held"

    def screens(self) -> list[str]:
        logs = [self.folder / f"{name}.log" for name in self.box.names]
        return [log.read_text(errors="replace") if log.exists() else "" for log in logs]

    def since(self, before: Sequence[int]) -> list[str]:
        """Return the text that each host has printed since `marks` returned `before`."""
        return [screen[start:] for screen, start in zip(self.screens(), before, strict=True)]

    def marks(self) -> list[int]:
        return [len(screen) for screen in self.screens()]

    def last_world(self, before: Sequence[int]) -> int:
        """Return the largest number of ranks among the starts of the run that have logged a step since `marks` returned
        `before`. Return 0 if there is no such start."""
        return max((world for text in self.since(before) for world in _worlds_with_steps(text)), default=0)

    def wait(self, condition: Callable[[], bool], what: str) -> float:
        """Wait until a condition is true, and return the elapsed seconds. The method raises TimeoutError if the hosts
        print nothing for too long."""
        began = heard = time.monotonic()
        said = self.marks()
        while not condition():
            now = time.monotonic()
            if (marks := self.marks()) != said:
                said, heard = marks, now
            if now - heard > PATIENCE * crowding() or now - began > LONGEST:
                told = f"waited {now - began:.0f} s, for {now - heard:.0f} s of them without a word from any host"
                raise TimeoutError(f"{told}: {what}; logs in {self.folder}")
            time.sleep(0.1)
        return time.monotonic() - began


def crowding() -> float:
    """Return the recent load average of this machine per processor, but at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _worlds_with_steps(text: str) -> list[int]:
    """Return the world size of each start of the run that logged a step. `text` is the output of a host."""
    starts = list(WORLD.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)] * bool(starts)
    return [int(start[1]) for start, end in zip(starts, ends, strict=True) if STEP.search(text, start.end(), end)]


@dataclass
class Outcome:
    """Outcome of one fault."""

    named: dict[str, tuple[float, str]]
    """Dictionary that maps each host to the number of seconds until its output named the fault, and to the line that
    named the fault."""

    went_on: float = math.nan
    came_back: float = math.nan
    ranks_left: int = 0
    recovered: str = ""
    """Message with which the run reported that it recovered from in-memory copies of the training state."""


def strike(run: Run, fault: Fault, host: int) -> Outcome:
    """Cause a fault, wait until the run continues, repair the fault, and wait until all hosts have joined the run
    again."""
    box, before = run.box, run.marks()
    fault.strike(box, host)
    began, outcome = time.monotonic(), Outcome({})
    expected = [number for number in range(len(box.names)) if fault.strike is not Box.kill_host or number != host]

    def look() -> bool:
        for number, text in enumerate(run.since(before)):
            found = NAMING.search(text)
            if found and box.names[number] not in outcome.named and number in expected:
                outcome.named[box.names[number]] = (time.monotonic() - began, found[0])
        outcome.ranks_left = run.last_world(before)
        if outcome.ranks_left and outcome.went_on != outcome.went_on:
            outcome.went_on = time.monotonic() - began
        found = RECOVERED.search("".join(run.since(before)))
        outcome.recovered = found[0] if found else ""
        return bool(outcome.ranks_left) and len(outcome.named) == len(expected)

    if fault.harmless:
        steps = len(STEP.findall("".join(run.since(before))))
        run.wait(lambda: len(STEP.findall("".join(run.since(before)))) >= steps + 20, "20 steps with a slow link")
        look()
        box.set_rate(host, RATE)
        return outcome
    run.wait(
        lambda: look() or (outcome.ranks_left > 0 and time.monotonic() - began > 90), f"going on after {fault.name}"
    )
    before = run.marks()
    if fault.strike is Box.kill_host:
        box.boot(host)
        run.start(host)
    else:
        box.plug(host)
        if not run.scripts[host].running:
            run.start(host)
    whole = len(box.names) * run.ranks
    outcome.came_back = run.wait(lambda: run.last_world(before) == whole, f"all hosts back after {fault.name}")
    return outcome


def told(outcome: Outcome) -> str:
    """Return a one-line summary of a fault's outcome."""
    if not outcome.ranks_left:
        return "nothing was interrupted"
    named = "; ".join(f"{name} after {seconds:.1f} s: {line}" for name, (seconds, line) in outcome.named.items())
    went_on = f"went on after {outcome.went_on:.0f} s on {outcome.ranks_left} ranks"
    went_on += f", {outcome.recovered}" if outcome.recovered else ""
    return f"named by {named or 'nobody'}; {went_on}; all back {outcome.came_back:.0f} s after mending"


def finish(run: Run) -> int:
    """Request the run to stop, wait until the programs on all hosts have exited, and return the iteration of the last
    checkpoint."""
    (run.save / "exit").touch()
    for process in run.scripts.values():
        process.wait(PATIENCE)
    return int((run.save / "latest_checkpointed_iteration.txt").read_text())


def losses(save: Path) -> dict[int, tuple[float, float]]:
    """Return a dictionary that maps each iteration to its loss and gradient norm."""
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return {record["iteration"]: (record["lm_loss"], record["grad_norm"]) for record in records}


def undisturbed(folder: Path, iterations: int) -> dict[int, tuple[float, float]]:
    """Train the model of the faulty run in one process, without faults. Return the result of `losses`."""
    save = folder / "undisturbed"
    command = [sys.executable, "pretrain_gpt.py", *MODEL, "--exit-interval", str(iterations), "--save", str(save)]
    with (folder / "undisturbed.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
    return losses(save)


def difference(run: Run, last: int) -> float:
    """Compare a run with a one-process run, and return the largest relative difference between their losses and
    gradient norms over all iterations. The function raises AssertionError if an iteration is missing."""
    found, expected = losses(run.save), undisturbed(run.folder, last)
    assert sorted(found) == sorted(expected) == list(range(1, last + 1)), f"iterations are missing: {run.folder}"
    pairs = [(x, y) for number in found for x, y in zip(found[number], expected[number], strict=True)]
    return max(abs(x - y) / abs(y) for x, y in pairs)


def strike_all(faults: Sequence[tuple[Fault, int]], args: argparse.Namespace) -> None:
    """Cause faults in a single run, one after another, and compare the result of the run with the result of a
    one-process run."""
    folder, moments, (first, _) = Path(tempfile.mkdtemp(prefix="host-faults-")), random.Random(args.seed), faults[0]
    with hosts(args.hosts, RATE) as box:
        environ = {"PACE": args.pace, "HOLD": first.hold, "HELD": str(folder / "held")}
        run = Run(box, args.ranks, folder, ["--tp", str(args.tp), *args.flags.split()], environ)
        for host in range(args.hosts):
            run.start(host)
        if first.early:
            run.wait(lambda: all("joins the rendezvous" in text for text in run.screens()), "start of the scripts")
        elif first.hold:
            run.wait(run.held.exists, f"being held at {first.hold}")
        else:
            run.wait(lambda: run.last_world([0] * args.hosts) == args.hosts * args.ranks, "the first step")
        for fault, host in faults:
            time.sleep(0 if fault.early or fault.hold else moments.uniform(0.0, 3.0))
            print(f"{fault.text} (host{host}): {told(strike(run, fault, host))}", flush=True)
        last = finish(run)
    worst = difference(run, last)
    print(f"{last} iterations, none missing; losses and norms differ from one process's by at most {worst:.0e}")
    assert worst < 1e-9, f"see {folder}"
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults between hosts of a box: named, gone on from, nothing lost.")
    parser.add_argument("names", nargs="*", help=f"faults; default: all of {', '.join(each.name for each in FAULTS)}")
    parser.add_argument("--random", type=int, default=0, help="this many random faults instead, in one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--flags", default="", help="further flags of the run, as one text: '--peer-copies 1'")
    parser.add_argument("--pace", default="0.2", help="seconds that each step sleeps")
    args = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    if args.random:
        draw = random.Random(args.seed)
        kinds = [fault for fault in FAULTS if not fault.hold and not fault.early and fault.host == 1]
        strike_all([(draw.choice(kinds), draw.randrange(args.hosts)) for _ in range(args.random)], args)
        return
    for fault in FAULTS:
        if not args.names or fault.name in args.names:
            strike_all([(fault, fault.host)], args)


if __name__ == "__main__":
    main()
