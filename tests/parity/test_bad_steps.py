"""Test that steps with NaNs, infinities or loss spikes are reported and skipped, both under parallel layouts and in one
process."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.optimizer.distrib_optimizer import StepResult, Update
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.hooks import Callback, Parts, StepFinding, Verdict
from megatron.training.initialize import local_runtime
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.step_guard import BadStepError
from megatron.training.tasks import save
from megatron.training.train_step import train_step
from tests.extensions import installed
from tests.harness import local_run, run_world

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --cpu --mock-data "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 "
    "--eval-iters 0 --num-workers 0"
)
MOE = (
    "--disable-bias-linear --num-experts 4 --moe-aux-loss-coeff 1e-2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
SAMPLE = 13
"""Index of the faulty sample. The sample is in the third micro-batch of the second step, which consists of samples 8 to
15."""


def config_of(flags: str, world_size: int = 1) -> RunConfig:
    return resolve_legal(parse_args([*MODEL.split(), *flags.split()]), world_size)


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].masked_fill(ctx.saved_tensors[0], math.inf), None


def plant(kind: str, run: TrainingRun) -> None:
    """Plant a fault in layer 2. Depending on `kind`, the fault affects the forward or the backward pass of the MLP for
    one sample, or the gradient of a weight."""
    for model in run.stages.values():
        for layer in model.decoder.layers:
            if layer.number != 2:
                continue
            if kind == "weight gradient":
                layer.input_layernorm.weight.register_hook(lambda grad: grad * math.nan)
                continue
            inner = layer.mlp.forward

            def forward(x: torch.Tensor, context: Any, inner: Any = inner) -> torch.Tensor:
                bad = (context.sample_index == SAMPLE)[None, :, None]
                if kind == "backward":
                    return inner(_BadGradient.apply(x, bad), context)
                return inner(x, context).masked_fill(bad, math.nan)

            layer.mlp.forward = forward


def tensors(run: TrainingRun) -> list[torch.Tensor]:
    """Return this rank's weights, model states and optimizer moments."""
    found = [param for model in run.stages.values() for param in model.parameters()]
    return [tensor.detach().clone() for tensor in (*found, *(piece.data for piece in run.optimizer.sharded_state()))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def skip(rank: int, world_size: int, config: RunConfig, kind: str | None, steps: int) -> tuple[list, tuple]:
    with local_run(config, rank, world_size) as run:
        if kind:
            plant(kind, run)
        for _ in range(steps):
            train_step(run)
        run.guard.settle()
        progress = run.progress
        return tensors(run), (progress.consumed_samples, progress.skipped_iterations, progress.nan_iterations)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, "--tp 2 --pp 2 --sequence-parallel"),
        (1, MOE),
        (2, "--dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000"),
    ],
)
def test_a_step_skipped_automatically_equals_one_skipped_by_the_user(world_size: int, flags: str) -> None:
    by_itself = config_of(f"{flags} --max-skipped-iterations 1", world_size)
    by_user = config_of(f"{flags} --iterations-to-skip 2", world_size)
    for (one, progress), (other, expected) in zip(
        run_world(world_size, skip, by_itself, "forward", 4), run_world(world_size, skip, by_user, None, 4), strict=True
    ):
        assert same(one, other)
        assert (progress, expected) == ((32, 1, 1), (32, 1, 0))


def rates(
    rank: int, world_size: int, config: RunConfig, kind: str | None, steps: int
) -> list[tuple[float, float, int]]:
    """Train, and return one tuple (learning rate, weight decay, number of samples) per step. The result does not
    contain steps that are skipped because of a flag."""
    with local_run(config, rank, world_size) as run:
        if kind:
            plant(kind, run)
        found, inner = [], run.optimizer.step

        def step(update: Update) -> StepResult:
            samples = run.progress.next_step(run.batch_sizes).samples
            found.append((update.rates.lr, update.rates.weight_decay, samples))
            return inner(update)

        run.optimizer.step = step  # type: ignore[method-assign]
        for _ in range(steps):
            train_step(run)
        run.guard.settle()
        return found


SCHEDULE = "--lr-warmup-iters 2 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.4"


def expected_rates(updates: list[int]) -> list[Any]:
    """Return the expected learning rates and weight decays after the given numbers of updates. The learning rate warms
    up over two updates and then decays linearly until update 40. The weight decay increases linearly."""
    lrs = [1e-2 * (n / 2 if n <= 2 else (40 - n) / 38) for n in updates]
    return [pytest.approx((lr, 0.4 * n / 40, 8), rel=1e-12) for lr, n in zip(lrs, updates, strict=True)]


@pytest.mark.parametrize(
    ("flags", "kind", "updates"),
    [
        ("--max-skipped-iterations 1", "forward", [0, 1, 1, 2]),
        ("--iterations-to-skip 2", None, [0, 1, 2]),
        ("--fp16 --initial-loss-scale 1e30", None, [0, 0, 0, 0]),
        ("", None, [0, 1, 2, 3]),
    ],
)
def test_the_schedule_does_not_advance_in_skipped_steps(flags: str, kind: str | None, updates: list[int]) -> None:
    (found,) = run_world(1, rates, config_of(f"{SCHEDULE} {flags}"), kind, 4)
    assert found == expected_rates(updates)


@pytest.mark.skipif(not installed("phases"), reason="phases is deleted")
def test_the_batch_size_ramp_counts_skipped_steps() -> None:
    """The batch size is 4 until 8 samples are consumed, and 8 afterwards."""
    flags = MODEL.replace("--train-iters 40", "--train-samples 320")
    flags += " --rampup-batch-size 4 4 8 --no-check-for-nan-in-loss-and-grad"
    config = resolve_legal(parse_args(flags.split()), 1)
    (found,) = run_world(1, rates, config, "weight gradient", 3)
    assert [samples for *_, samples in found] == [4, 4, 8]


def test_without_the_check_steps_are_skipped_without_a_limit() -> None:
    ((_, progress),) = run_world(1, skip, config_of("--no-check-for-nan-in-loss-and-grad"), "weight gradient", 3)
    assert progress == (24, 3, 3)


def multiply_losses(run: TrainingRun, samples: tuple[int, ...]) -> None:
    (model,) = run.stages.values()
    inner = model.forward

    def forward(hidden: Any, batch: Any) -> torch.Tensor:
        large = torch.isin(batch.sample_index, torch.tensor(samples))
        return inner(hidden, replace(batch, loss_mask=batch.loss_mask * torch.where(large, 50.0, 1.0)[:, None]))

    model.forward = forward


SPIKES = "--check-for-spiky-loss --check-for-large-grads --max-skipped-iterations 2"


def spiky(
    rank: int, world_size: int, config: RunConfig, steps: int, samples: tuple[int, ...]
) -> tuple[list[torch.Tensor], dict[str, Any], list[bool]]:
    with local_run(config, rank, world_size) as run:
        multiply_losses(run, samples)
        interval = run.interval = Interval()
        for _ in range(steps):
            train_step(run)
        run.guard.settle()
        run.guard.store_means()
        if run.saver.writer is not None:
            save(run)
        progress = {
            key: value for key, value in vars(run.progress).items() if key not in ("loaded_from", "past_batches")
        }
        return tensors(run), progress, [result.spike for result in interval.results]


@pytest.mark.skipif(not installed("diagnosis"), reason="diagnosis is deleted")
def test_spikes_are_skipped_and_resume_is_exact(tmp_path: Path) -> None:
    samples = (8 * 12 + 3, 8 * 16 + 5)  # the faulty samples belong to steps 13 and 17
    ((whole, progress, spikes),) = run_world(1, spiky, config_of(SPIKES), 20, samples)
    assert [number for number, spike in enumerate(spikes, 1) if spike] == [13, 17]
    assert (progress["skipped_spikes"], progress["skipped_iterations"], progress["nan_iterations"]) == (2, 2, 0)
    assert progress["running_means"][2] == 18
    assert (progress["consumed_samples"], progress["scheduled_samples"]) == (160, 144)
    saved = f"{SPIKES} --save {tmp_path} --load {tmp_path} --no-async-save"
    run_world(1, spiky, config_of(saved), 14, samples)
    ((resumed, again, _),) = run_world(1, spiky, config_of(saved), 6, samples)
    assert same(resumed, whole) and again == progress
    ((skipped, _),) = run_world(1, skip, config_of("--iterations-to-skip 13 17"), None, 20)
    assert same(skipped, whole)


@pytest.mark.skipif(not installed("diagnosis"), reason="diagnosis is deleted")
def test_one_spike_more_than_allowed_ends_the_run() -> None:
    samples = (8 * 12, 8 * 13, 8 * 14)
    with pytest.raises(
        RuntimeError, match=r"2 iterations have already been skipped.*iteration 15 is far above the mean"
    ):
        run_world(1, spiky, config_of(SPIKES), 16, samples)


@pytest.mark.skipif(not installed("diagnosis"), reason="diagnosis is deleted")
def test_spikes_are_only_reported_where_nothing_may_be_skipped() -> None:
    flags = "--check-for-spiky-loss"
    ((_, progress, spikes),) = run_world(1, spiky, config_of(flags), 14, (8 * 12,))
    assert spikes.index(True) == 12
    assert (progress["skipped_iterations"], progress["running_means"][2]) == (0, 14)


def ends(rank: int, world_size: int, config: RunConfig, searches: list[StepFinding | None]) -> tuple[str, str]:
    """Run until a bad step ends the run, and return the error message and the advice. One callback is registered for
    each element of `searches`, and its method `search` returns this element."""

    class Searches(Callback):
        def __init__(self, finding: StepFinding | None) -> None:
            self.finding = finding

        def search(self, verdict: Verdict) -> StepFinding | None:
            assert verdict.ends_run and verdict.step.iteration == run.progress.iteration
            return self.finding

    parts = Parts([Searches(finding) for finding in searches])
    run = build_run(config, local_runtime(config, rank, world_size), parts)
    with closing(run.data):
        plant("weight gradient", run)
        train_step(run)
        with pytest.raises(BadStepError) as error:
            run.guard.settle()
        return str(error.value).partition(" (")[0] + str(error.value).partition(")")[2], error.value.advice


def test_searches_of_extensions_report_their_findings() -> None:
    plain = "to continue without the step, add --iterations-to-skip 1; to skip such steps automatically, "
    plain += "--max-skipped-iterations; if the loss or the gradient norm had grown before, lower --lr or lengthen the "
    plain += "warm-up, and resume from an earlier checkpoint"
    config, bad = config_of(""), "iteration 1 is not finite"
    assert run_world(1, ends, config, []) == run_world(1, ends, config, [None]) == [(bad, plain)]
    found = [StepFinding("the sun", "wait for the night"), None, StepFinding("the moon")]
    assert run_world(1, ends, config, found) == [(f"{bad}; the sun; the moon", f"wait for the night; {plain}")]
