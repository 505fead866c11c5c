"""Tasks that are evaluated on the training model: layouts score as one process does, and training is as without."""

from __future__ import annotations

from functools import lru_cache

import pytest

from tests.extensions import needs
from tests.extensions.evaluation.eval_cases import EXPERTS, LLAMA, MODEL, TASKS, assert_same_results, evaluated
from tests.harness import run_world

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
def test_every_layout_scores_as_one_process_does(style: str, world_size: int, layout: str) -> None:
    for found in run_world(world_size, evaluated, STYLES[style] + FLAGS + layout):
        assert_same_results(found, alone(style))
        assert found[2] == pytest.approx(alone(style)[2], rel=1e-9)


@pytest.mark.parametrize("style", ["gpt", "experts", needs("fp8", "fp8")])
def test_training_does_not_see_the_evaluation(style: str) -> None:
    (_, samples, losses), (_, none, without) = alone(style), run_world(1, evaluated, STYLES[style] + FLAGS, False)[0]
    assert samples and not none
    assert losses == without, "bit for bit"
