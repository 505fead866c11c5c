"""Run training for a long time with faults at regular intervals. Memory, threads, open files and log volume must not
grow.

    python -m tests.extensions.job_restarts.soak --steps 20000 --every 100

Two ranks run on separate hosts, with in-memory copies of checkpoints and restarts within the job. The ranks fail in
turn: by SIGKILL, by an error, and by SIGKILL after the in-memory copies are complete. Between any two faults, the
program measures the processes once: the ranks, their parent processes, which the launcher started, and the processes
that hold copies. The program prints the means over the first and the last tenth of the samples, and the bytes of logs
per step. This program does not check the losses of the run, which `tests.extensions.peer_copies.campaign` checks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron.extensions import load
from megatron.training import training
from megatron.training.reliability.launch import START
from megatron.training.run import TrainingRun
from tests.extensions.peer_copies.runs import Run, await_copies
from tests.forked import forked_ranks

KINDS = ("kill", "error", "copied")
LOGS = ("screen", "save/metrics.jsonl", "save/run_events.jsonl")
Sample = dict[str, float]


def measured(pid: int) -> Sample:
    """Return four values for a process: its anonymous and its shared memory in KiB, its number of threads, and its
    number of open files. Raise OSError if the process has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {
        words[0].rstrip(":"): float(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:", "Threads:")
    }
    return found | {"files": float(len(os.listdir(f"/proc/{pid}/fd")))}


def children_of(pid: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def soaked_main(run: Run, every: int) -> Callable[[list[str]], int]:
    """Return a variant of `pretrain_gpt.main` in which the ranks fail in turn."""

    def main(argv: list[str]) -> int:
        rank, made = int(os.environ["RANK"]), training.train_step

        def step(of: TrainingRun) -> None:
            number, done = int(os.environ.get(START, "0")), of.progress.iteration
            if done >= (number + 1) * every and number % 2 == rank:
                if KINDS[number % len(KINDS)] == "copied":
                    await_copies(of)
                run._breaks(KINDS[number % len(KINDS)])
            made(of)

        training.train_step = step
        return pretrain_gpt.main(argv)

    return main


def sample_of(run: Run, parents: Sequence[int]) -> dict[str, Sample]:
    """Measure all processes, and return one sample per process, keyed by name. Raise OSError if a process is missing
    because ranks are being restarted."""
    found = {f"parent {number}": measured(pid) for number, pid in enumerate(parents)}
    for number, pid in enumerate(parents):
        (child,) = children_of(pid)
        found[f"rank {number}"] = measured(child)
        holder = json.loads((run.held_by(number) / "holder.json").read_text())["pid"]
        found[f"holder {number}"] = measured(int(holder))
    return found


def watch(run: Run, parents: Sequence[int], every: int, ranks: Sequence[Any]) -> list[tuple[int, dict[str, Sample]]]:
    """Sample the processes once between any two faults until the run ends, and return pairs (iteration, sample)."""
    samples = list[tuple[int, dict[str, Sample]]]()
    while any(process.is_alive() for process in ranks):
        time.sleep(0.2)
        with suppress(OSError, ValueError, IndexError, KeyError):
            last = (run.save / "metrics.jsonl").read_bytes()[-4000:].splitlines()[-1]
            iteration = int(json.loads(last)["iteration"])
            due = len(samples) == 0 or iteration // every > samples[-1][0] // every
            if due and iteration % every > every // 2:
                samples.append((iteration, sample_of(run, parents)))
                if len(samples) % 10 == 0:
                    print(f"iteration {iteration}", *table(samples), sep="\n", flush=True)
    return samples


def table(samples: Sequence[tuple[int, Mapping[str, Sample]]]) -> list[str]:
    """Return the lines of a table that compares the first tenth of the samples with the last tenth. The first sample is
    a warm-up and does not count."""
    rest = samples[1:]
    tenth = max(1, len(rest) // 10)
    lines = [f"{'process':<10}{'value':<10}{'first tenth':>13}{'last tenth':>13}{'per 1000 steps':>16}"]
    steps = rest[-1][0] - rest[0][0] or 1
    for process in rest[0][1]:
        for name in rest[0][1][process]:
            early, late = (
                statistics.mean(each[process][name] for _, each in part) for part in (rest[:tenth], rest[-tenth:])
            )
            lines.append(f"{process:<10}{name:<10}{early:>13,.1f}{late:>13,.1f}{1000 * (late - early) / steps:>16,.2f}")
    return lines


def phases(screen: str, events: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the median duration in seconds of each phase of a restart. The phases of a restart are:
    detection of the failure, end of the ranks, exchange between the parent processes, fork of new ranks, and the first
    step. The median durations of the steps of startup are also listed."""
    lines = re.findall(r"^ *start-up \(s\): (.*)$", screen, re.MULTILINE)[1:]
    starts = [dict(part.rsplit(" ", 1) for part in line.split(" | ")) for line in lines]
    pairs = list(zip(events, starts, strict=False))
    found = {"detected": [float(event["detected_after"]) for event, _ in pairs]}
    found["ended, met, forked, first step"] = [
        event["recovered_after"] - event["detected_after"] - float(start["total"]) for event, start in pairs
    ]
    found |= {name: [float(start.get(name, 0)) for start in starts] for name in starts[0]}
    return " | ".join(f"{name} {statistics.median(seconds):.2f}" for name, seconds in found.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ranks with faults, and print the table of measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--every", type=int, default=100)
    asked = parser.parse_args(argv)
    load()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--train-iters {asked.steps} --restarts-in-job 4 --save-interval 1000 --lr-decay-style constant".split()
        )
        run = Run(Path(folder), 2, flags)
        words = (2, run.flags, run.screen, run._prepare, soaked_main(run, asked.every))
        try:
            with forked_ranks(*words) as processes:
                samples = watch(run, [process.pid for process in processes], asked.every, processes)
                codes = [process.exitcode for process in processes]
        finally:
            run.end()
        print("\n".join(table(samples)))
        done = int(run.metrics()[-1][0])
        sizes = ", ".join(f"{name} {(run.folder / name).stat().st_size / done:,.0f}" for name in LOGS)
        events = run.events("recovery")
        seconds = sorted(float(event["recovered_after"]) for event in events)
        lost = sum(event["steps_lost"] for event in events)
        print(f"bytes for each step: {sizes}")
        print(
            f"{done:,} steps, {len(events)} recoveries, {lost} steps lost, exit codes {codes}, "
            f"{(time.monotonic() - began) / 60:.0f} minutes; seconds to the next step: median "
            f"{statistics.median(seconds):.1f}, longest {seconds[-1]:.1f}"
        )
        print(f"of a restart, median (s): {phases(run.screen.read_text(errors='replace'), events)}")


if __name__ == "__main__":
    main()
