"""Traces of torch's profiler: of the steps and ranks that were asked for."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from megatron.training.training import train
from tests.harness import run_world

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 --lr 1e-2 --cpu --mock-data "
    "--train-iters 4 --num-workers 0 --eval-iters 0 --log-interval 1 --profile --profile-step-start 1 "
)


def profiled(rank: int, size: int, flags: str, folder: str) -> None:
    config = resolve(parse_args([*flags.split(), "--metrics-file", f"{folder}/metrics", "--tensorboard-dir", folder]), size)
    with local_run(config, rank, size) as run, ExitStack() as resources:
        train(run, resources)


def updates(trace: Path) -> int:
    """Optimizer steps in a trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step") for event in events)


def test_steps_and_ranks_of_a_profile(tmp_path: Path) -> None:
    run_world(2, profiled, RUN + "--profile-step-end 3 --profile-ranks 1", str(tmp_path))
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-1.json"]
    assert updates(tmp_path / "profile" / "rank-1.json") == 2


def test_a_run_that_ends_within_its_profile_writes_it(tmp_path: Path) -> None:
    run_world(1, profiled, RUN + "--profile-step-end 30", str(tmp_path))
    assert updates(tmp_path / "profile" / "rank-0.json") == 3


def test_rules() -> None:
    config = resolve(parse_args((RUN + "--profile-step-end 1 --profile-ranks 0 5").split()), 2)
    assert [problem.flag for problem in validate(config, 2)] == ["--profile-step-end", "--profile-ranks"]
