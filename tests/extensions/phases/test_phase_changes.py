"""Runs across a change of phase: killed around it, resumed at other layouts, and compared with undisturbed runs.

A run has three phases over two sources, one of which occurs in all of them: another blend, sequence length, rotary
base, batch size and learning rate from a random sample on, and the first length again later. Within two steps of the
change a random rank gets SIGKILL, and the same command resumes at another layout. The log of samples must be, byte by
byte, that of one process from beginning to end; no sample may occur twice or be left out; and in fp64 every logged
loss, loss of a source, gradient norm, learning rate and number of tokens is equal to within 1e-9.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.corpus import write_documents
from tests.forked import forked_ranks, join, run_forked
from tests.limits import HANG

ITERATIONS = 12
MODEL = (
    "--cpu --fp64 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--make-vocab-size-divisible-by 8 --position-embedding-type rope --lr 1e-2 --lr-warmup-iters 2 --split 1,0,0 "
    f"--global-batch-size 8 --train-iters {ITERATIONS} --log-interval 1 --eval-iters 0 --save-interval 2 --keep-last 3 "
    "--num-workers 1 --log-source-loss"
).split()
LAYOUTS = (
    (1, "--micro-batch-size 2"),
    (2, "--tp 2 --sequence-parallel"),
    (2, "--pp 2"),
    (2, "--cp 2"),
    (2, "--dp 2"),
    (4, "--tp 2 --pp 2"),
    (4, "--cp 2 --dp 2"),
)
COMPARED = ("iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate")
SOURCES = ("source_web_loss", "source_code_loss")
TOLERANCE = 1e-9


def write_data(folder: Path) -> None:
    """Two sources; their documents begin in different places, so that origins tell samples apart."""
    random = np.random.default_rng(1)
    for name in ("web", "code"):
        write_documents(folder / name, (random.integers(0, 64, int(random.integers(5, 60))) for _ in range(120)))


def write_phases(folder: Path, change: int) -> Path:
    """From sample `change` on 24 samples or a few more of another kind, then the first kind again."""
    web, code, path = folder / "web", folder / "code", folder / "phases.yaml"
    path.write_text(
        f"- {{name: main, data-path: 3 {web} 1 {code}}}\n"
        f"- {{name: long, from-samples: {change}, data-path: 1 {web} 1 {code}, seq-length: 32, rotary-base: 5e5, "
        "global-batch-size: 4, lr: 5e-3, lr-decay-style: cosine, lr-warmup-iters: 1}\n"
        f"- {{name: end, from-samples: {change + 24}, data-path: {web}, lr: 1e-3, lr-decay-style: linear}}\n"
    )
    return path


def killed_and_resumed(random: Random, folder: Path, layouts: Sequence[tuple[int, str]]) -> None:
    """Two runs of one random change of phase, each of which is killed once and resumed at another layout."""
    write_data(folder)
    change = random.randrange(9, 40)
    phases = write_phases(folder, change)
    step = -(-change // 8)  # steps of 8 before the change
    alone = folder / "alone"
    run_forked(1, _flags(alone, phases, LAYOUTS[0][1]), folder / "screen")
    for number in range(2):
        first, second = random.sample(layouts, 2)
        target = min(max(1, step + random.randint(-2, 2)), ITERATIONS - 1)
        save = folder / f"save-{number}"
        killed = _start_and_kill(first, _flags(save, phases, first[1]), save, target, random, folder / "screen")
        run_forked(second[0], _flags(save, phases, second[1]), folder / "screen")
        assert not [*_differences(save, alone, change)], (change, killed, first, second)


def _flags(save: Path, phases: Path, layout: str) -> list[str]:
    files = ["--save", str(save), "--load", str(save), "--sample-log", str(save / "samples.jsonl")]
    return [*MODEL, "--data-phases", str(phases), *files, *layout.split()]


def _start_and_kill(
    layout: tuple[int, str], flags: list[str], save: Path, target: int, random: Random, screen: Path
) -> int:
    with forked_ranks(layout[0], flags, screen) as ranks:
        limit = time.monotonic() + HANG
        while len(_records(save)) < target:
            if any(process.exitcode is not None for process in ranks) or time.monotonic() > limit:
                raise RuntimeError(f"no {target} iterations were logged:\n{screen.read_text()[-4000:]}")
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.05))
        killed = len(_records(save))
        os.kill(random.choice(ranks).pid, signal.SIGKILL)
        if layout[0] > 1 and random.random() < 0.5:
            join(ranks)  # the others find it out; else they are killed too
    return killed


def _records(save: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = save / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # what is behind the last end is unfinished
    return [json.loads(line) for line in lines]


def planned_steps(change: int) -> list[tuple[int, int]]:
    """(first sample, last sample) of each step, as the phase file says."""
    steps, consumed, second = [], 0, -(-change // 8) * 8
    for _ in range(ITERATIONS):
        size = 4 if second <= consumed < change + 24 else 8
        steps.append((consumed, consumed + size - 1))
        consumed += size
    return steps


def _differences(save: Path, alone: Path, change: int) -> Iterator[str]:
    if (save / "samples.jsonl").read_bytes() != (alone / "samples.jsonl").read_bytes():
        yield "another log of samples than that of one process"
    log = _records(save, "samples.jsonl")
    if [tuple(record["samples"]) for record in log] != planned_steps(change):
        yield f"steps {[record['samples'] for record in log]} and not {planned_steps(change)}"
    origins = [origin for record in log for origin in record["origins"]]
    if len(set(origins)) < len(origins):
        yield "a sample occurs twice"
    one, other = _records(save), _records(alone)
    if len(one) != len(other):
        yield f"{len(one)} and {len(other)} logged iterations"
    for found, expected in zip(one, other, strict=False):
        for key in (*COMPARED, *SOURCES):
            if (found[key] is None or expected[key] is None) and found[key] is expected[key]:
                continue
            if abs(found[key] - expected[key]) > TOLERANCE * max(1.0, abs(expected[key])):
                yield f"iteration {expected['iteration']}: {key} {found[key]} and not {expected[key]}"


@pytest.mark.grid("seed", [7], range(7, 12))
def test_runs_killed_around_a_change_of_phase_take_each_sample_once(seed: int, tmp_path: Path) -> None:
    small = [layout for layout in LAYOUTS if layout[0] <= 2]
    killed_and_resumed(Random(seed), tmp_path, small if seed == 7 else LAYOUTS)


def test_a_validation_takes_the_data_of_its_phase(tmp_path: Path) -> None:
    """As an evaluation of the checkpoint does, which begins in that phase."""
    phases = tmp_path / "phases.yaml"
    phases.write_text("- {name: short, seq-length: 8}\n- {name: long, from-iterations: 2, seq-length: 16}\n")
    flags = [*MODEL, "--mock-data", "--data-phases", str(phases), "--train-iters", "4", "--eval-iters", "2"]
    flags += ["--eval-interval", "4", "--split", "8,1,1", "--load", str(tmp_path / "trained"), "--pp", "2"]
    found = []
    for name, more in (("trained", []), ("alone", ["--skip-train"])):
        run_forked(2, [*flags, "--save", str(tmp_path / name), *more], tmp_path / "screen")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append({key: value for line in lines for key, value in json.loads(line).items() if "_loss" in key})
    trained, alone = found
    assert {"valid_loss", "test_loss"} <= alone.keys() and {key: trained[key] for key in alone} == alone
