"""Evaluation weights and callback states are the same under any layout as in a one-process run. The planned size of
callback states is exact. The states are unchanged after saving, and after loading under a different layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.optimizer.owned_tensors import owned_weights
from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.plan.planner.memory import callback_bytes, planned_buffers, states_of_rank
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.evaluation import evaluate, weights_to_evaluate
from megatron.training.extensions import CALLBACKS, load_extensions
from megatron.training.hooks import Callback, Log
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.forked import ROOT
from tests.harness import run_world
from tests.tiny import TINY

FLAGS = f"{TINY} --eval-iters 2 --eval-interval 2 --optimizer averaged_adam --average-decay 0.5"
LAYOUTS = {
    "zero1": (2, ""),
    "replicated": (2, "--no-use-distributed-optimizer"),
    "tp2-dp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2-tied": (2, "--pipeline-model-parallel-size 2"),
    "zero3": (2, "--data-parallel-sharding-strategy optim_grads_params"),
}


class Sums(Callback):
    """Callback that adds the weights to its states after each training step."""

    def after_step(self, run: TrainingRun) -> None:
        by_kind = {kind: [piece for piece in self.states if piece.key == kind] for kind in ("sums", "twice")}
        for weight, one, two in zip(owned_weights(run.optimizer.ddp), *by_kind.values(), strict=True):
            one.data.add_(weight.data)
            two.data.add_(weight.data, alpha=2)


@pytest.fixture(scope="module", autouse=True)
def extensions() -> Iterator[None]:
    load_extensions([str(ROOT / "examples" / "averaged_adam.py")])
    CALLBACKS.register("sums of weights", Sums, states=("sums", "twice"))
    yield
    del CALLBACKS._entries["sums of weights"]


def config_of(flags: str, world_size: int) -> RunConfig:
    return resolve_legal(parse_args(f"{FLAGS} {flags}".split()), world_size)


def averaged(run: TrainingRun) -> dict[tuple[str, int, int], OptimizerPiece]:
    pieces = run.optimizer.sharded_state()
    return {(piece.meta.name, piece.start, piece.stop): piece for piece in pieces if piece.key == "averaged"}


def evaluated(rank: int, world_size: int, config: RunConfig) -> tuple[float, float]:
    """Train two steps, and return two validation losses: one with the averaged weights and one with the trained
    weights. Check that an evaluation does not change a single bit of the weights on any rank."""
    with local_run(config, rank, world_size) as run:
        callbacks, records = run.callbacks, list[dict[str, float]]()
        log = cast("Log", SimpleNamespace(write=records.append, say=print))
        for _ in range(2):
            train_step(run)
        run.ddp.gather_params_()
        before = [param.detach().clone() for param in run.ddp.params]
        for run.callbacks in (callbacks, ()):
            evaluate(run, "valid", log)
            run.ddp.gather_params_()
            assert all(torch.equal(a, b) for a, b in zip(before, run.ddp.params, strict=True))
        run.callbacks = callbacks
        with weights_to_evaluate(run):
            pieces = averaged(run)
            for weight in owned_weights(run.ddp):
                expected = pieces[weight.meta.name, weight.start, weight.stop].data.to(weight.data.dtype)
                assert torch.equal(weight.data, expected), weight.meta.name
        train_step(run)
        return records[0]["valid_loss"], records[1]["valid_loss"]


@cache
def evaluated_by_one(precision: str) -> tuple[float, float]:
    (expected,) = run_world(1, evaluated, config_of(f"{precision} --eval-averaged", 1))
    return expected


@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_averaged_weights_are_evaluated_and_training_continues_with_the_trained_weights(
    layout: str, precision: str
) -> None:
    world, flags = LAYOUTS[layout]
    expected = evaluated_by_one(precision)
    found = run_world(world, evaluated, config_of(f"{precision} --eval-averaged {flags}", world))
    tolerance = 1e-5 if precision == "--fp32" else 5e-3
    assert found == [pytest.approx(expected, rel=tolerance)] * world
    assert expected[0] != expected[1]


def test_no_averages_are_offered_before_the_first_update() -> None:
    run_world(1, not_offered, config_of("--fp32 --eval-averaged", 1))


def not_offered(rank: int, world_size: int, config: RunConfig) -> None:
    with local_run(config, rank, world_size) as run:
        assert isinstance(weights_to_evaluate(run), nullcontext)
        train_step(run)
        assert not isinstance(weights_to_evaluate(run), nullcontext)


def saved(rank: int, world_size: int, config: RunConfig) -> None:
    """Train two steps, and save the states of the callback `Sums`. Check that the states have the planned size in
    bytes."""
    with local_run(config, rank, world_size) as run:
        sums = next(callback for callback in run.callbacks if isinstance(callback, Sums))
        for _ in range(2):
            train_step(run)
            sums.after_step(run)
        run.saver.checkpoint.save(run.progress)
        dims = ParallelDims.from_config(config.parallel, world_size)
        metas = states_of_rank(config, dims, dims.coords(rank)["pp"]).metas
        held = {piece.data.untyped_storage().data_ptr(): piece.data.untyped_storage() for piece in sums.states}
        assert (
            sum(map(len, held.values()))
            == sum(callback_bytes(config, planned_buffers(config, dims, metas)).values())
            > 0
        )


def loaded(rank: int, world_size: int, config: RunConfig, folder: Path) -> None:
    """Check that every element of the loaded states equals the corresponding element of the checkpoint."""
    checkpoint = Checkpoint(folder)
    with local_run(config, rank, world_size) as run:
        sums = next(callback for callback in run.callbacks if isinstance(callback, Sums))
        assert sums.states
        for piece in sums.states:
            whole = checkpoint.read(f"callbacks.sums of weights.{piece.key}.{piece.meta.name}")
            for offset, data in piece.boxes(run.runtime.state.coords):
                spans = tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))
                assert torch.equal(data, whole[spans].to(data.dtype)), piece.meta.name


@pytest.fixture(scope="module")
def saved_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of a one-process run, and return the folder."""
    folder = tmp_path_factory.mktemp("one")
    run_world(1, saved, config_of(f"--fp64 --save {folder}", 1))
    return folder


@pytest.mark.parametrize(("before", "after"), [("zero1", "pp2-tied"), ("pp2-tied", "tp2-dp2"), ("tp2-dp2", "zero3")])
def test_states_have_the_planned_size_and_load_under_another_layout(
    before: str, after: str, saved_by_one: Path, tmp_path: Path
) -> None:
    world, flags = LAYOUTS[before]
    run_world(world, saved, config_of(f"--fp64 --save {tmp_path} {flags}", world))
    one, many = (Checkpoint(folder / "iter_0000002") for folder in (saved_by_one, tmp_path))
    keys = [key for key in one.tensors if key.startswith("callbacks.")]
    assert len(keys) == 2 * sum(key.startswith("model.") for key in one.tensors)
    for key in keys:
        torch.testing.assert_close(many.read(key), one.read(key), rtol=1e-9, atol=1e-11)
    world, flags = LAYOUTS[after]
    run_world(world, loaded, config_of(f"--fp64 --load {tmp_path} {flags}", world), many.folder)


def test_finetuning_starts_with_zero_states(saved_by_one: Path) -> None:
    run_world(1, at_zero, config_of(f"--fp64 --finetune --load {saved_by_one}", 1))


def at_zero(rank: int, world_size: int, config: RunConfig) -> None:
    with local_run(config, rank, world_size) as run:
        assert all(not piece.data.any() for callback in run.callbacks for piece in callback.states)
