"""A checkpoint saved under one schedule goes on under another: virtual stages come and go, tied embeddings too."""

from __future__ import annotations

from pathlib import Path

from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import relative_difference, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from megatron.training.tasks import save
from megatron.training.train_step import train_step
from tests.tiny import TINY

COMMON = f"{TINY} --num-layers 5 --fp64"
CHAIN = [
    (2, "--pp 2 --num-virtual-stages-per-pipeline-rank 2"),
    (2, "--pp 2 --pipeline-schedule zb-v --overlap-param-gather"),
    (3, "--pp 3"),
    (4, "--dp 2 --pp 2 --pipeline-schedule zb-v --overlap-grad-reduce --overlap-param-gather"),
]


def one_step(rank: int, world_size: int, argv: list[str]) -> int:
    config = resolve(parse_args(argv), world_size)
    with local_run(config, rank, world_size) as run:
        train_step(run)
        save(run)
        run.optimizer.finish_param_sync()
        return run.progress.iteration


def test_every_step_under_another_schedule(tmp_path: Path) -> None:
    for iteration, (world_size, layout) in enumerate(CHAIN[:-1], 1):
        argv = [*COMMON.split(), *layout.split(), "--no-async-save", "--save", str(tmp_path), "--load", str(tmp_path)]
        assert run_world(world_size, one_step, argv) == [iteration] * world_size
    world_size, layout = CHAIN[-1]
    found = train_in_world(world_size, [*COMMON.split(), *layout.split(), "--load", str(tmp_path)], steps=1)
    expected = train_in_world(1, COMMON.split(), steps=1, unseen=3)
    for key, value in found.tensors.items():
        if key.startswith("step 1 "):
            assert relative_difference(value, expected[key.replace("step 1", "step 4")]) < 1e-9, key
