"""Evaluation tasks in a run of a tiny model: what tests of --eval-tasks share."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.collectives import all_reduce_
from megatron.extensions.evaluation.in_loop import EvalTasks, generation_of, scorer_of
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.forked import ROOT

TASKS = ROOT / "tests" / "fixtures" / "eval_tasks"

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --lr 1e-2 --fp64 --cpu --num-workers 0 "
    "--tokenizer-type ByteTokenizer --vocab-size 257 --make-vocab-size-divisible-by 8 --mock-data --train-iters 3 "
    "--global-batch-size 4 --eval-iters 0 "
)
LLAMA = MODEL + "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
EXPERTS = LLAMA + "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "


def task_results(run: TrainingRun) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(scores by name, what each document came out as) of a run's tasks."""
    (suite,) = (callback.suite for callback in run.callbacks if isinstance(callback, EvalTasks))
    with run.pipeline.evaluation_mode():
        results = suite.evaluate(scorer_of(run), generation_of(run, suite.tokenizer))
    return {score.key: score.value for score in results.scores}, results.samples


def evaluated(
    rank: int, world_size: int, flags: str, evaluate: bool = True
) -> tuple[dict[str, float], list[dict[str, Any]], list[float]]:
    """Trains two steps, with the tasks between them: (scores, documents, losses of the steps)."""
    config = resolve_legal(parse_args(flags.split()), world_size)
    losses = []
    scores, samples = dict[str, float](), list[dict[str, Any]]()
    with local_run(config, rank, world_size) as run:
        for step in range(2):
            run.interval = Interval()
            train_step(run)
            loss, tokens = all_reduce_(run.interval.losses[0].clone(), run.runtime.state.world).tolist()
            losses.append(loss / tokens)
            if evaluate and step == 0:
                scores, samples = task_results(run)
    return scores, samples, losses


def assert_same_results(found: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float = 1e-9) -> None:
    """Equal generated texts and decisions, and numbers equal to rounding."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert len(found[1]) == len(expected[1]) > 0
    for one, other in zip(found[1], expected[1], strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            numbers = key == "log_likelihoods" or isinstance(value, float)
            assert one[key] == (pytest.approx(value, rel=tolerance) if numbers else value), (key, one)
