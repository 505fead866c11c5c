"""Test that steps with a non-finite loss or gradient are detected, saved and replayed. The tests use one process and
several parallel layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.extensions.observe.diagnosis.flags import DiagnosisConfig
from megatron.extensions.observe.diagnosis.nonfinite_search import BACKWARD, FORWARD, WEIGHT_GRADIENT, Finding, search
from megatron.extensions.observe.diagnosis.step_dump import CONFIG, SavedStep
from megatron.extensions.observe.diagnosis.step_replay import config_of as replay_config_of
from megatron.extensions.observe.diagnosis.step_replay import replay
from megatron.training.config.arguments import parse_args, save_config
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.extensions import CALLBACKS, Problem, extension_flags
from megatron.training.run import TrainingRun
from megatron.training.step_guard import BadStepError
from megatron.training.train_step import train_step
from tests.extensions.cuda_graphs.test_graphs import FakeRecorder, use_graphs
from tests.harness import local_run, run_world
from tests.parity.test_bad_steps import MODEL, SAMPLE, config_of, plant, same, skip, tensors


def fail(rank: int, world_size: int, config: RunConfig, kind: str) -> tuple[str, bool]:
    """Run until a non-finite step ends the run. Return two values: the error message, and True if the weights and
    moments are the same as before the step."""
    with local_run(config, rank, world_size) as run:
        plant(kind, run)
        if kind != "weight gradient":
            train_step(run)
        before = tensors(run)
        train_step(run)
        with pytest.raises(BadStepError) as error:
            train_step(run)  # the error is raised before the gradients are used
        return str(error.value), same(before, tensors(run))


@pytest.mark.parametrize("kind", ["forward", "backward", "weight gradient"])
def test_module_and_sample_are_named_and_replayed_in_one_process(kind: str, tmp_path: Path) -> None:
    results = run_world(4, fail, config_of(f"--tp 2 --pp 2 --save {tmp_path}", 4), kind)
    (message,) = {message for message, _ in results}
    assert all(unchanged for _, unchanged in results)
    iteration = 1 if kind == "weight gradient" else 2
    folder = tmp_path / "nan" / f"iter_000000{iteration}"
    saved = SavedStep.read(folder)
    found = saved.finding
    assert found is not None and found.describe() in message and str(folder) in message
    assert (found.where, found.rank, found.stage, found.weights) == (kind, 2, 1, ())
    assert saved.step.iteration == iteration
    if kind == "weight gradient":
        assert found.module == "decoder.layers.2.input_layernorm.weight"
    else:
        assert (found.module, found.microbatch, found.samples) == ("decoder.layers.2.mlp", 2, (SAMPLE,))
        assert found.sources_finite and math.isfinite(found.largest)

    again = replay(folder, prepare=partial(plant, kind))
    assert again is not None and again.same_as(found)
    assert (again.microbatch, again.samples, again.stage) == (found.microbatch, found.samples, 0)
    assert replay(folder) is None, "without the planted value, everything is finite"
    # The folder is also a checkpoint of the state right before the non-finite step.
    on = config_of(f"--load {folder} --iterations-to-skip {iteration}")
    ((_, progress),) = run_world(1, skip, on, None, 2)
    assert progress == (8 * (iteration + 1), 1, 0)


def message_of(rank: int, world_size: int, config: RunConfig, plant: Callable[[TrainingRun], Any]) -> tuple[str, Any]:
    """Plant a fault that makes the first step non-finite. Return the error message that ends the run, and the result of
    `plant`."""
    with local_run(config, rank, world_size) as run:
        planted = plant(run)
        train_step(run)
        with pytest.raises(BadStepError) as error:
            run.guard.settle()
        return str(error.value), planted


def poison(run: TrainingRun) -> int:
    """Set one row of the embedding to NaN, and return the index of the first sample that uses the row."""
    table = run.stages[0].embedding.word_embeddings.weight
    readers = {token: sample for sample in range(7, -1, -1) for token in run.data.train.dataset[sample]["tokens"]}
    token, sample = max(readers.items(), key=lambda item: item[1])
    table.data[token] = math.nan
    for shard in run.optimizer.shards:
        shard.main.data.copy_(shard.bucket.owned_params)
    return sample


def test_weights_that_are_not_finite_are_named() -> None:
    # The output layer is untied, because a tied output layer would make every logit NaN.
    ((message, sample),) = run_world(1, message_of, config_of("--untie-embeddings-and-output-weights"), poison)
    assert sample > 0
    assert f"embedding.word_embeddings (rank 0, pipeline stage 0), micro-batch {sample // 2}, sample" in message
    assert re.search(rf"samples? {sample}[,;]", message)
    assert "weights: not finite before the step: embedding.word_embeddings.weight" in message


def once(run: TrainingRun) -> None:
    left = [1]

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * math.nan if left and left.pop() else None

    run.stages[0].decoder.layers[0].register_forward_hook(hook)


def test_a_nan_that_does_not_recur_is_reported_as_such() -> None:
    ((message, _),) = run_world(1, message_of, config_of(""), once)
    assert "iteration 1 is not finite (loss nan" in message and "with the same weights and samples" in message


def finding(where: str, stage: int, place: int, sample: int = 0, rank: int = 0) -> Finding:
    return Finding(where, "module", (sample,), 0, rank, stage, True, place=place)


def test_the_first_finding_is_the_first_in_the_model() -> None:
    ordered = [
        finding(FORWARD, 0, 3, sample=5),
        finding(FORWARD, 0, 3, sample=9),
        finding(FORWARD, 0, 3, sample=9, rank=1),
        finding(FORWARD, 0, 4, sample=1),
        finding(FORWARD, 1, 1),
        finding(BACKWARD, 1, 7),
        finding(BACKWARD, 0, 2),
        finding(WEIGHT_GRADIENT, 1, 0),
    ]
    mixed = ordered[::-1]
    assert sorted(mixed, key=lambda each: each.order) == ordered
    assert Finding.from_json(asdict(ordered[0])) == ordered[0]


def searched(rank: int, world_size: int, config: RunConfig) -> tuple[int, int]:
    with local_run(config, rank, world_size) as run:
        recorder = FakeRecorder()
        use_graphs(run, recorder)
        step = run.progress.next_step(run.batch_sizes)
        assert search(run.forward_backward, step, run.data.read_batches(step), run.optimizer.loss_scale) is None
        return recorder.recorded, recorder.replayed


def test_a_search_covers_modules_replayed_by_graphs() -> None:
    assert run_world(1, searched, config_of("--fp32")) == [(0, 0)]


@pytest.mark.usefixtures("forget_extensions_at_once")
def test_a_replay_omits_callbacks_whose_inputs_are_not_saved(tmp_path: Path) -> None:
    def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
        if config.tokenizer.tokenizer_type is None:
            yield Problem("--own-texts", None, "needs a tokenizer", "add one")

    @extension_flags("own texts", may_change=True, rules=rules)
    @dataclass(frozen=True)
    class OwnTexts:
        own_texts: int = 0
        """Texts."""

    CALLBACKS.register("own texts", "nowhere:Nothing", when=lambda config: config.options(OwnTexts).own_texts > 0)
    saved = parse_args([*MODEL.split(), *"--own-texts 3 --profile --tokenizer-type NullTokenizer".split()])
    save_config(saved, tmp_path / CONFIG)
    again = resolve_legal(replay_config_of(tmp_path, []), 1)
    assert again.options(OwnTexts).own_texts == 0 and again.options(DiagnosisConfig) == DiagnosisConfig()
