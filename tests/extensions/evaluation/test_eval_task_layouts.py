"""Tests of tasks on which a model is evaluated while it is trained. The scores under every layout equal the scores of
one process, and training is unaffected."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any

import pytest

from megatron.core.collectives import all_reduce_
from megatron.extensions.observe.evaluation.harness import record_of
from megatron.extensions.observe.evaluation.in_loop import EvalTasks, model_of
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.progress import Interval
from megatron.training.train_step import train_step
from tests.extensions import needs
from tests.forked import ROOT
from tests.harness import run_world

TASKS = ROOT / "tests" / "fixtures" / "eval_tasks"

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --lr 1e-2 --fp64 --cpu --num-workers 0 "
    "--tokenizer-type ByteTokenizer --vocab-size 257 --make-vocab-size-divisible-by 8 --mock-data --train-iters 3 "
    "--global-batch-size 4 --eval-iters 0 "
)
LLAMA = MODEL + "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
EXPERTS = LLAMA + "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "


def evaluated(
    rank: int, world_size: int, flags: str, evaluate: bool = True
) -> tuple[dict[str, float], list[dict[str, Any]], list[float]]:
    """Train two steps, and evaluate the tasks between the two steps. Return the scores, the evaluated documents, and
    the loss of each step."""
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
                (suite,) = (callback.suite for callback in run.callbacks if isinstance(callback, EvalTasks))
                with run.pipeline.evaluation_mode():
                    results = suite.evaluate(model_of(run))
                scores, samples = record_of(results), list(chain(*results["samples"].values()))
    return scores, samples, losses


def numbers(document: dict[str, Any]) -> tuple[list[float], list[Any]]:
    """Return two lists for a document: its log-likelihoods, and all its other results (`is_greedy` booleans and
    generated texts)."""
    flat = [each for (answer,) in document["resps"] for each in (answer if isinstance(answer, tuple) else (answer,))]
    return [each for each in flat if isinstance(each, float)], [each for each in flat if not isinstance(each, float)]


def assert_same_results(found: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float = 1e-9) -> None:
    """Assert that generated texts and booleans are equal, and that numbers are equal within `tolerance`."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert len(found[1]) == len(expected[1]) > 0
    for one, other in zip(found[1], expected[1], strict=True):
        (logs, decisions), (expected_logs, expected_decisions) = numbers(one), numbers(other)
        assert one["doc_hash"] == other["doc_hash"] and one["arguments"] == other["arguments"]
        assert logs == pytest.approx(expected_logs, rel=tolerance) and decisions == expected_decisions


FLAGS = f"--eval-tasks {TASKS} --eval-tasks-limit 2 "
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0.2 "
FP8 = LLAMA.replace("--fp64", "--bf16 --fp8-format hybrid --fp8-recipe delayed") + "--make-vocab-size-divisible-by 32 "
STYLES = {"gpt": MODEL + DROPOUT, "llama": LLAMA, "experts": EXPERTS, "fp8": FP8}

PART = [
    ("gpt", 4, "--tp 2 --pp 2 --sequence-parallel"),
    ("llama", 4, "--cp 2 --pp 2 --num-layers-per-virtual-pipeline-stage 1"),
    ("experts", 2, "--ep 2 --eval-tasks-batch-tokens 200"),
]
WHOLE = [
    *PART,
    ("gpt", 8, "--tp 2 --pp 2 --dp 2 --sequence-parallel"),
    ("llama", 2, "--pp 2 --pipeline-schedule zb-v"),
    ("llama", 4, "--cp 2 --tp 2 --cp-comm-type a2a --sequence-parallel"),
    ("llama", 2, "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp"),
    ("experts", 4, "--ep 2 --pp 2"),
]


@lru_cache(None)
def alone(style: str) -> tuple:
    return run_world(1, evaluated, STYLES[style] + FLAGS)[0]


@pytest.mark.grid(("style", "world_size", "layout"), PART, WHOLE)
def test_every_layout_has_the_scores_of_one_process(style: str, world_size: int, layout: str) -> None:
    for found in run_world(world_size, evaluated, STYLES[style] + FLAGS + layout):
        assert_same_results(found, alone(style))
        assert found[2] == pytest.approx(alone(style)[2], rel=1e-9)


@pytest.mark.parametrize("style", ["gpt", "experts", needs("fp8", "fp8")])
def test_an_evaluation_does_not_change_the_training(style: str) -> None:
    (_, samples, losses), (_, none, without) = alone(style), run_world(1, evaluated, STYLES[style] + FLAGS, False)[0]
    assert samples and not none
    assert losses == without, "bit for bit"
