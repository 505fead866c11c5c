"""A step may update the weights before the gradient norm is known and roll the update back later. The results are
bit-identical to those of a step that waits for the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, build_schedule
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.pipeline.post_validation.flags import PostValidationFlags
from megatron.extensions.pipeline.post_validation.post_validation import PostValidatedOptimizer
from megatron.extensions.pipeline.post_validation.rules import WAIT_FOR_RANK_0
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import findings, notices, resolve, resolve_legal
from megatron.training.extensions import load_extensions
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun
from megatron.training.tasks import save
from megatron.training.train_step import train_step
from tests.extensions import installed, needs
from tests.forked import ROOT
from tests.harness import local_run, plant_nan, run_world
from tests.rules import BASE
from tests.tiny import TINY

MODEL = f"{TINY} --num-layers 6 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --vocab-size 60 "
MODEL += "--train-iters 40 --global-batch-size 8 --micro-batch-size 1 --optimizer-post-validation"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.1"
)
SWITCH = "--optimizer-post-validation"
DROPOUT, CLIPPED, FREE = "--hidden-dropout 0.2 --attention-dropout 0.2", "--clip-grad 0.01", "--clip-grad 1000"
IN_CI = "clipped", "overflows of the loss scale", "states of a chain"
CASES: dict[str, tuple[int, str, int | None]] = {
    "clipped": (2, f"--pp 2 --pipeline-schedule zb-h2 --fp64 {DROPOUT} {CLIPPED}", 3),
    "clipped, 16 bits": (2, f"--pp 2 --pipeline-schedule zb-v --bf16 {CLIPPED} {MOE} --mtp-num-layers 1", 3),
    "overflows of the loss scale": (2, "--pp 2 --fp16 --hysteresis 1 --initial-loss-scale 1e15 --clip-grad 1000", None),
    "sometimes clipped": (4, f"--pp 4 --pipeline-schedule zb-h2 --fp64 {DROPOUT} --clip-grad 1.5", None),
    "not clipped": (2, f"--pp 2 --pipeline-schedule zb-v --fp64 {FREE}", 0),
    "delayed fp8": (2, f"--pp 2 --bf16 --fp8-format hybrid --fp8-recipe delayed {CLIPPED}", 3),
    "without moments": (2, f"--pp 2 --pipeline-schedule zb-h2 --optimizer sgd --fp64 {CLIPPED}", 3),
    "states of a chain": (2, f"--pp 2 --pipeline-schedule zb-h2 --optimizer shampoo --fp64 {CLIPPED}", 3),
    "spikes": (2, f"--pp 2 --pipeline-schedule zb-h2 --fp64 {FREE} --check-for-large-grads", 0),
}
"""Tuples (number of ranks, flags, number of rolled-back steps among the first three steps), keyed by case. The last
number is None if it is unknown. The parity matrix (tests/parity) tests other layouts."""


def config_of(flags: str, world_size: int) -> RunConfig:
    return resolve_legal(parse_args([*MODEL.split(), *flags.split()]), world_size)


def waiting(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration in which every optimizer step waits for the gradient norm."""
    return config.with_options(PostValidationFlags())


@contextmanager
def verdicts() -> Iterator[list[bool]]:
    """Yield a list that receives one boolean per early update. The boolean is True if the update was rolled back."""
    found: list[bool] = []
    true = PostValidatedOptimizer.validate

    def validate_(self: PostValidatedOptimizer) -> bool:
        waits = self._unvalidated is None
        rolled_back = true(self)
        found.extend([] if waits else [rolled_back])
        return rolled_back

    with mock.patch.object(PostValidatedOptimizer, "validate", validate_):
        yield found


def always_ahead() -> AbstractContextManager[Any]:
    """Within the context, no step waits for the gradient norm. By default, a step that follows a rollback waits."""
    return mock.patch.object(PostValidatedOptimizer, "likely_to_stand", return_value=True)


def state_of(run: TrainingRun) -> dict[str, Any]:
    """Return copies of the states and parameters, which the tests compare bit for bit."""
    pieces = run.optimizer.sharded_state()
    found: dict[str, Any] = {f"{p.key} {p.meta.name} {p.start}": p.data.detach().clone() for p in pieces}
    for model in run.stages.values():
        found |= {name: param.detach().clone() for name, (param, _) in model.named_metas().items()}
    for i, tensor in enumerate(run.forward_backward.step_state()):
        found[f"tally {i}"] = tensor.detach().clone()
    return found | {"step": run.optimizer.step_count, "scaler": run.optimizer.scaler.state_dict()}


def trained(run: TrainingRun, steps: int, plant: Callable[[TrainingRun], None] | None = None) -> dict[str, Any]:
    """Train for `steps` steps. Return a dictionary that contains the state of the run and the result and loss of each
    step."""
    interval = run.interval = Interval()
    if plant is not None:
        plant(run)
    for _ in range(steps):
        train_step(run)
    state = state_of(run)
    results = [(repr(r.grad_norm), r.skipped, r.loss_scale) for r in interval.results]
    return state | {"results": results, "losses": torch.stack(interval.losses)}


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of values that are not bit-identical."""
    assert a.keys() == b.keys() and len(a) > 20
    return [key for key, value in a.items() if not _same(value, b[key])]


def _same(x: Any, y: Any) -> bool:
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) if isinstance(x, Tensor) else x == y


def both(
    rank: int, world_size: int, config: RunConfig, plant: Callable[[TrainingRun], None] | None
) -> tuple[list[str], list[bool], list[bool]]:
    """Train four steps with and without waiting for the norm. Return the differences between the two runs, and two
    booleans per step: whether the step's early update was rolled back, and whether the step was skipped."""
    with local_run(waiting(config), rank, world_size) as run:
        expected = trained(run, 4, plant)
    with always_ahead(), verdicts() as rolled_back, local_run(config, rank, world_size) as run:
        found = trained(run, 4, plant)
    return different(expected, found), rolled_back, [skipped for _, skipped, _ in found["results"]]


@pytest.mark.grid("name", IN_CI, [needs("fp8", name) if "fp8" in name else name for name in CASES])
def test_an_update_before_the_norm_is_bit_identical_to_one_that_waits(name: str) -> None:
    load_extensions([str(ROOT / "examples" / "shampoo.py")])
    world_size, flags, rolls_back = CASES[name]
    for wrong, rolled_back, skipped in run_world(world_size, both, config_of(flags, world_size), None):
        assert not wrong and len(rolled_back) == 4
        assert rolls_back is None or sum(rolled_back[:3]) == rolls_back
        assert any(skipped) == (name == "overflows of the loss scale")


def test_a_nan_in_the_last_stage_alone_is_skipped_by_all() -> None:
    flags = "--pp 2 --pipeline-schedule zb-h2 --fp64 --max-skipped-iterations 1 --clip-grad 1000"
    for wrong, rolled_back, skipped in run_world(2, both, config_of(flags, 2), partial(plant_nan, iteration=1)):
        assert not wrong
        assert skipped == [False, True, False, False] == rolled_back


def resumed(rank: int, world_size: int, config: RunConfig, folder: str) -> list[str]:
    """Train four steps that wait for the gradient norm. In a second run, train two steps that do not wait, save a
    checkpoint, and resume for two more steps. Return the differences between the two runs."""
    with local_run(waiting(config), rank, world_size) as run:
        expected = trained(run, 4)
    saving = replace(config, checkpoint=replace(config.checkpoint, save=folder))
    with verdicts() as rolled_back, local_run(saving, rank, world_size) as run:
        train_step(run)
        with always_ahead():
            train_step(run)
        save(run)
        run.saver.finish()
        assert rolled_back == [True, True]
    loading = replace(config, checkpoint=replace(config.checkpoint, load=folder))
    with verdicts() as rolled_back, local_run(loading, rank, world_size) as run:
        assert run.progress.iteration == 2
        found = trained(run, 2)
        assert rolled_back == [True]  # after a clipped step, the next step waits for the norm
    for state in (expected, found):
        del state["results"], state["losses"]
    return [key for key in different(expected, found) if not key.startswith("tally")]


def test_a_checkpoint_has_the_validated_state(tmp_path: Path) -> None:
    config = config_of(f"--pp 2 --pipeline-schedule zb-v --fp64 {CLIPPED} {DROPOUT}", 2)
    assert run_world(2, resumed, config, str(tmp_path)) == [[], []]


BUBBLES = [
    ("--pipeline-schedule zb-h2 --untie-embeddings-and-output-weights", "0.0%", ""),
    ("--pipeline-schedule zb-h2", "7.7%", "the first and the last rank"),
    ("--pipeline-schedule zb-v", "0.0%", ""),
    ("--pipeline-schedule zb-v --log-interval 1", "4.0%", "--log-interval 1"),
]


@pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")
@pytest.mark.parametrize(("flags", "bubble", "notice"), BUBBLES)
def test_the_plan_shows_the_bubble_of_the_flags(flags: str, bubble: str, notice: str) -> None:
    from megatron.extensions.plan.planner import dry_run as description

    given = parse_args([*MODEL.split(), "--pp", "2", "--global-batch-size", "4", *flags.split()])
    config, said = resolve(given, 2), [p for p in notices(given, 2) if p.flag == SWITCH]
    assert len(said) == bool(notice) and all(notice in str(problem) for problem in said)
    assert config.options(PostValidationFlags).optimizer_post_validation == ("--log-interval" not in notice)
    even = {"stage_costs": lambda *_: (1.0,) * pipeline_layout(config.model, config.parallel).num_stages}
    with mock.patch.multiple(description, **even):
        assert f"bubble {bubble}" in description._pipeline_line(config, 4)


@pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")
@pytest.mark.parametrize("schedule", [name for name in PIPELINE_SCHEDULES if PIPELINE_SCHEDULES.facts(name).flushes])
def test_schedules_that_wait_for_rank_0_are_those_that_the_simulator_finds(schedule: str) -> None:
    from megatron.extensions.plan.planner.time.pipeline import post_validated

    p, m, chunks = 4, 8, PIPELINE_SCHEDULES.facts(schedule).chunks
    time, _ = post_validated(pipeline_lists(schedule, p, m, chunks, validates=True))
    saved = simulate(build_schedule(schedule, p, m, chunks), StageCosts()).makespan - time
    assert (saved == pytest.approx(0)) == (schedule in WAIT_FOR_RANK_0)


def test_post_validation_is_disabled_without_a_pipeline() -> None:
    given = parse_args([*BASE.split(), "--optimizer-post-validation", "--use-precision-aware-optimizer"])
    (notice,) = findings(given, 1)
    assert notice.harmless and "has no effect without --pipeline-model-parallel-size above 1" in str(notice)
    assert not resolve(given, 1).options(PostValidationFlags).optimizer_post_validation
