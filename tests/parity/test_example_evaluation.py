"""Tests of examples that read the logits: a loss that sums over the vocabulary, and an evaluation metric."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.cross_entropy import local_columns
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import validate
from megatron.training.evaluation import evaluate, summed_loss, weights_to_evaluate
from megatron.training.extensions import load_extensions
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.forked import ROOT
from tests.harness import run_world, running
from tests.tiny import TINY

EXTENSIONS = [str(ROOT / "examples" / name) for name in ("label_smoothing.py", "token_accuracy.py")]
FLAGS = f"{TINY} --fp64 --eval-iters 2 --attention-dropout 0 --hidden-dropout 0"

VOCABULARIES = [(50, 8), (20, 64)]
"""Test cases (vocabulary size, divisor of the padded vocabulary size). Some or all columns of the last rank are
padding."""


class Records(list[dict[str, Any]]):
    """List that acts as a log: written records are appended to it."""

    def write(self, record: dict[str, Any]) -> None:
        self.append(record)


def smoothed(rank: int, world_size: int, vocabulary: int, divisor: int) -> tuple[Tensor, Tensor]:
    """Compute the label smoothing loss of the logits that `given` returns. Return the losses, and this rank's shard of
    the logit gradient of the weighted sum of the losses."""
    load_extensions(EXTENSIONS)
    flags = f"{FLAGS} --vocab-size {vocabulary} --make-vocab-size-divisible-by {divisor} --tp {world_size}"
    smoothing = "--loss-func label_smoothing --label-smoothing 0.2"
    with running(f"{flags} {smoothing}".split(), rank, world_size) as run:
        logits, labels, weights = given(vocabulary, run.config.model.padded_vocab_size)
        local = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
        loss = run.stages[0].loss
        assert loss is not None
        losses = loss(local * 1, labels)
        (losses * weights).sum().backward()
        assert local.grad is not None
        return losses.detach(), local.grad


def given(vocabulary: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [s, b, V], labels [s, b], and loss weights [s, b]."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(8, 2, padded, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (8, 2), generator=generator)
    return logits, labels, torch.rand(8, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("vocabulary", "divisor"), VOCABULARIES)
@pytest.mark.parametrize("tp", [1, 2])
def test_label_smoothing_is_that_of_torch(tp: int, vocabulary: int, divisor: int) -> None:
    found = run_world(tp, smoothed, vocabulary, divisor)
    gradient = torch.cat([grad for _, grad in found], -1)
    logits, labels, weights = given(vocabulary, gradient.shape[-1])
    logits.requires_grad_()
    flat = logits[..., :vocabulary].flatten(0, 1)
    expected = F.cross_entropy(flat, labels.flatten(), label_smoothing=0.2, reduction="none").view_as(labels)
    (expected * weights).sum().backward()
    for losses, _ in found:
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-9, atol=1e-9)
    assert not gradient[..., vocabulary:].any()


def measured(rank: int, world_size: int, flags: str) -> tuple[float, float, float, dict[str, Any]]:
    """Take one step, then measure the accuracy. Return the accuracy, the loss before the measurement, the loss after
    the measurement, and the logged record."""
    load_extensions(EXTENSIONS)
    with running(f"{FLAGS} --accuracy-interval 1 {flags}".split(), rank, world_size) as run:
        train_step(run)
        before, log = mean_loss(run), Records()
        (callback,) = [each for each in run.callbacks if each.name == "token accuracy"]
        (task,) = callback.tasks(run, log)
        assert task.evaluates and task.is_due(1, last=False)
        task.run()
        (record,) = log
        after = mean_loss(run)
        evaluate(run, "valid", log)
        if world_size == 1:
            assert record["valid_accuracy"] == pytest.approx(accuracy_written_out(run), rel=1e-12)
        return record["valid_accuracy"], before, after, log[1]


def mean_loss(run: TrainingRun) -> float:
    found = summed_loss(run, run.data.evaluated("valid")[""], 0, 2, "valid")
    assert found is not None
    return found[0] / found[1]


@torch.no_grad()
def accuracy_written_out(run: TrainingRun) -> float:
    """Compute the accuracy on the same samples from the unsharded logits of a one-process model."""
    (model,), correct, total = run.stages.values(), 0.0, 0.0
    dataset = run.data.evaluated("valid")[""].dataset
    assert isinstance(weights_to_evaluate(run), nullcontext)
    model.eval()
    for batch in run.data.evaluated("valid")[""].next_step(0, 2 * run.config.training.eval_batch_size):
        whole = Batch(**dict(batch))
        hits = (model.logits(None, whole).argmax(-1) == whole.labels) * whole.loss_mask
        correct, total = correct + float(hits.sum()), total + float(whole.loss_mask.sum())
    model.train()
    assert len(dataset) >= 2 * run.config.training.eval_batch_size
    return correct / total


LAYOUTS = [(2, "--tp 2"), (2, "--pp 2"), (2, ""), (4, "--tp 2 --sequence-parallel --pp 2"), (2, "--cp 2")]


@pytest.mark.parametrize(("vocabulary", "divisor"), VOCABULARIES)
def test_token_accuracy_is_the_same_at_every_layout(vocabulary: int, divisor: int) -> None:
    model = f"--vocab-size {vocabulary} --make-vocab-size-divisible-by {divisor}"
    ((expected, *losses, record),) = run_world(1, measured, model)
    assert 0 < expected < 1 and losses[0] == losses[1] == record["valid_loss"]
    assert record["valid_perplexity"] == pytest.approx(torch.tensor(losses[0]).exp().item())
    for world_size, layout in [*LAYOUTS, (1, "--loss-chunk-tokens 3")]:
        for accuracy, before, after, _ in run_world(world_size, measured, f"{model} {layout}"):
            assert accuracy == expected and before == after == pytest.approx(losses[0], rel=1e-9), layout


@pytest.mark.parametrize("flags", ["--loss-func label_smoothing", "--z-loss-coeff 1e-2"])
def test_only_a_plain_cross_entropy_has_a_perplexity(flags: str) -> None:
    ((*_, record),) = run_world(1, measured, flags)
    assert "valid_loss" in record and not [key for key in record if "perplexity" in key]


def test_the_accuracy_needs_validation_data() -> None:
    load_extensions(EXTENSIONS)
    problems = validate(parse_args(f"{FLAGS} --eval-iters 0 --accuracy-interval 2".split()), 1)
    assert [str(each) for each in problems] == ["--accuracy-interval 2: needs --eval-iters above 0; raise --eval-iters"]


def lookups(rank: int, world_size: int, flags: str, split: str, name: str) -> tuple[list[str], str]:
    """Return the names of the evaluation sets of a split, and the error message for looking up an unknown name."""
    with running(f"{TINY} {flags}".split(), rank, world_size) as run:
        sets = run.data.evaluated(split)
        with pytest.raises(ValueError, match="; ") as error:
            sets[name]
        return list(sets), str(error.value)


ZERO = "--eval-iters 0: must be at least 1 to evaluate the validation data; raise it, or evaluate no data"


@pytest.mark.parametrize(
    ("flags", "split", "name", "message"),
    [
        ("--eval-iters 0", "valid", "", ZERO),
        ("--eval-iters 0", "test", "", ZERO.replace("validation", "test")),
        ("--eval-iters 1", "valid", "mine", "--valid-data-path: no validation set is named mine; use the unnamed set"),
    ],
)
def test_a_lookup_of_a_missing_set_names_the_remedy(flags: str, split: str, name: str, message: str) -> None:
    ((names, found),) = run_world(1, lookups, flags, split, name)
    assert found == message and names == ([] if "0" in flags else [""])


@pytest.mark.parametrize("tp", [1, 2])
def test_columns_of_a_rank(tp: int) -> None:
    found = [local_columns(torch.empty(2, 1, 64 // tp), 20, Axis(size=tp, rank=rank)) for rank in range(tp)]
    assert found == [(0, 20), (32, 0)][:tp]
