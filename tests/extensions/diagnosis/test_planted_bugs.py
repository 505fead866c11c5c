"""Tests that plant bugs in small training runs. The bugs hardly change the loss. --log-layer-stats reports each bug and
raises no alarm in runs without bugs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.training.hooks import Callback, RunView
from megatron.training.run import TrainingRun
from tests.harness import run_world, train_to_the_end

MODEL = (
    "--cpu --num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data "
    "--make-vocab-size-divisible-by 8 --global-batch-size 8 --micro-batch-size 8 --normalization RMSNorm --lr 1e-2 "
    "--lr-warmup-iters 10 --untie-embeddings-and-output-weights --num-workers 0 --log-interval 5 --log-layer-stats 1 "
    "--eval-iters 0 "
)
LAYER, RATE, SCALE = 2, 1.05, 1.5


Plant = Callable[[TrainingRun, int], object]


@dataclass(frozen=True)
class Bug:
    ranks: int
    plant: Plant
    """Function that introduces the bug. The function is called before the first step with two arguments: the run, and
    the iteration at which the bug takes effect."""

    names: str
    """Text that an alarm must contain to count as a detection of the bug."""


class EachStep(Callback):
    """Callback that calls a function after each step, beginning with the step that precedes iteration `first`."""

    def __init__(self, run: TrainingRun, first: int, function: Callable[[], object]) -> None:
        super().__init__(run.config)
        self.first, self.function = first, function
        run.callbacks = (*run.callbacks, self)

    @torch.no_grad()
    def on_step_end(self, run: RunView) -> None:
        if run.progress.iteration >= self.first - 1:
            self.function()


def _layer(run: TrainingRun) -> Any:
    return next(layer for stage in run.stages.values() for layer in stage.decoder.layers if layer.number == LAYER)


def growing_weight(run: TrainingRun, first: int) -> None:
    """Multiply the weight of the norm before the MLP by `RATE` in each step."""
    weight = _layer(run).pre_mlp_layernorm.weight
    EachStep(run, first, lambda: weight.mul_(RATE))


def scaled_embeddings(run: TrainingRun, first: int) -> None:
    """Make tensor-parallel rank 1 multiply its rows of the embedding by `SCALE` once."""
    embedding = next(iter(run.stages.values())).embedding
    assert embedding is not None
    weight, factors = embedding.word_embeddings.weight, iter([SCALE] if run.runtime.state.tp.rank == 1 else [])
    EachStep(run, first, lambda: weight.mul_(next(factors, 1.0)))


def scaled_lookup(run: TrainingRun, first: int) -> None:
    """Make tensor-parallel rank 1 multiply the embeddings that it looks up, and the gradients of these embeddings, by
    `SCALE`. The embedding weights stay the same."""
    embedding = next(iter(run.stages.values())).embedding
    assert embedding is not None
    table, tp = embedding.word_embeddings, run.runtime.state.tp

    def scaled(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        """Scale the embedding output `out` [s/tp, b, h] at some tokens. `args` contains the tokens [b, s]."""
        if run.progress.iteration < first - 1:
            return out
        own = args[0].t().chunk(tp.size)[tp.rank]
        return out * torch.where(own >= table.vocab_rows // tp.size, SCALE, 1.0)[..., None]

    # The hook is prepended to run before the statistics hook, so that the statistics are computed from the scaled
    # output.
    table.register_forward_hook(scaled, prepend=True)


def shared_seed(run: TrainingRun, first: int) -> None:
    """Give the shards of all tensor-parallel ranks the same initial values, as if all ranks used one seed."""
    with torch.no_grad():
        for stage in run.stages.values():
            for parameter, meta in stage.named_metas().values():
                if "tp" in meta.sharded:
                    dist.broadcast(parameter.data, 0)


BUGS = {
    "gain of a norm grows": Bug(1, growing_weight, f"layer {LAYER} is out of line"),
    "embeddings of TP rank 1 scaled": Bug(2, scaled_embeddings, "rank 1 is out of line: the weight_norm of its part"),
    "lookups of TP rank 1 scaled": Bug(2, scaled_lookup, "rank 1 is out of line: the output_norm of its part"),
    "TP ranks share a seed": Bug(2, shared_seed, "Do the ranks use the same seed?"),
}


def records(path: Path, ranks: int, flags: str, plant: Plant, first: int) -> list[dict[str, Any]]:
    """Train with a planted bug, and return the metric records that the run writes to `path`."""
    layout = f"--tp {ranks} --sequence-parallel" if ranks > 1 else ""
    argv = f"{flags} {layout} --metrics-file {path}".split()
    run_world(ranks, train_to_the_end, argv, partial(plant, first=first))
    return [json.loads(line) for line in path.read_text().splitlines()]


def nothing(run: TrainingRun, first: int) -> None:
    """No bug."""


def alarms(found: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return one tuple (iteration, log line) per layer alarm."""
    return [(record["iteration"], line) for record in found for line in record.get("layer_alarms", ())]


AT, AFTER_WARM_UP = 32, 62


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_within_ten_steps(tmp_path: Path, name: str) -> None:
    bug = BUGS[name]
    first = 1 if bug.plant is shared_seed else AFTER_WARM_UP if bug.plant is scaled_lookup else AT
    found = records(tmp_path / "metrics.jsonl", bug.ranks, f"{MODEL} --train-iters {first + 10}", bug.plant, first)
    told = alarms(found)
    assert told and all(first <= iteration < first + 10 for iteration, _ in told)
    assert any(bug.names in line for _, line in told)


def test_a_run_without_a_bug_raises_no_alarm(tmp_path: Path) -> None:
    found = records(tmp_path / "metrics.jsonl", 1, f"{MODEL} --train-iters 75", nothing, 0)
    assert alarms(found) == []
    assert [record["iteration"] for record in found if "layers" in record] == [*range(1, 76)]
    assert {record["schema"] for record in found} == {1}
