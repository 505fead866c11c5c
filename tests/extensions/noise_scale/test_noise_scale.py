"""Under every layout, the noise scale equals the value that its definition gives for the norms of all gradients."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.extensions.observe.noise_scale.estimate import Coefficients, Window
from megatron.extensions.observe.noise_scale.measure import NoiseScale, counts
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal, validate
from megatron.training.train_step import train_step
from tests.forked import run_forked
from tests.harness import run_world
from tests.tiny import TINY

RUN = f"{TINY} --fp64 --log-noise-scale --micro-batch-size 1 --global-batch-size 8 --train-iters 40"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0"


def config_of(flags: str, world_size: int) -> RunConfig:
    return resolve_legal(parse_args(f"{RUN} {flags}".split()), world_size)


def test_gaussian_gradients_have_the_known_noise_scale() -> None:
    """The gradients have 50 elements with mean 0.1 and standard deviation 0.5. The noise scale is therefore tr(S) /
    |G|^2 = 12.5 / 0.5 = 25."""
    draw, window = random.Random(1), Window(400)
    noise, signal = Coefficients.of_noise(2, 16), Coefficients.of_signal(2, 16)
    for _ in range(400):
        samples = [[draw.gauss(0.1, 0.5) for _ in range(50)] for _ in range(16)]
        small, large = (sum((sum(axis) / n) ** 2 for axis in zip(*samples[:n], strict=True)) for n in (2, 16))
        window.add([[each.small * small + each.large * large for each in (noise, signal)]])
        found = window.estimate()
    assert found is not None and found.low < 25 < found.high and found.high - found.low < 6
    assert found.scale == pytest.approx(25, rel=0.1)


def test_steps_without_update_do_not_count() -> None:
    window = Window(2)
    window.add([(0.0, 0.0), (3.0, 1.0), (0.0, 0.0)])
    assert window.estimate() is None
    window.add([(5.0, 1.0), (7.0, 1.0)])
    found = window.estimate()
    assert found is not None and found.scale == 6
    assert list(window.rows) == [(5.0, 1.0), (7.0, 1.0)]


def measured(rank: int, world_size: int, config: RunConfig, steps: int) -> list[list[float]]:
    """Train, and return [tr(S), |G|^2] for each step except the first, measured over all ranks."""
    with local_run(config, rank, world_size) as run:
        (meter,) = [each for each in run.meters if isinstance(each, NoiseScale)]
        for _ in range(steps):
            train_step(run)
        run.step.finish()
        found = meter.take()
        if world_size > 1:
            torch.distributed.all_reduce(found)
        return found.view(-1, 2)[1:].tolist()


def literal(rank: int, world_size: int, config: RunConfig, steps: int) -> tuple[list[list[float]], list[Tensor]]:
    """Return the result of `measured`. Also return, for each step, the gradients [micro-batch, elements] that count
    towards the noise scale."""
    with local_run(config, rank, world_size) as run:
        (meter,) = [each for each in run.meters if isinstance(each, NoiseScale)]
        params = [param for param in run.ddp.params if counts(param.meta, config.model)]
        sums: dict[int, list[Tensor]] = {}
        for number, param in enumerate(params):
            before = param.on_main_grad

            def note(number: int = number, param: Tensor = param, before: object = before) -> None:
                sums.setdefault(number, []).append(param.main_grad.detach().flatten().clone())
                before()

            param.on_main_grad = note
        gradients = []
        for _ in range(steps):
            sums.clear()
            train_step(run)
            prefix = torch.cat([torch.stack(each) for each in sums.values()], dim=1)
            own = prefix.diff(dim=0, prepend=torch.zeros_like(prefix[:1]))
            gradients.append(own / config.model.seq_length)
        run.step.finish()
        return meter.take().view(-1, 2)[1:].tolist(), gradients[1:]


def expected(gradients: Tensor, replicas: int) -> list[float]:
    """Estimate tr(S), the trace of the gradient covariance, and |G|^2, the squared gradient norm, from the gradients of
    all samples in a step. The small batches consist of the first sample of each replica, because samples are assigned
    to replicas in round-robin order."""
    large = len(gradients)
    first = gradients[:replicas].square().sum(dim=1).mean()
    whole = gradients.mean(dim=0).square().sum()
    return [float((first - whole) / (1 - 1 / large)), float((large * whole - first) / (large - 1))]


@pytest.mark.parametrize("model", ["", f"{EXPERTS} --untie-embeddings-and-output-weights"])
def test_a_step_measures_the_moments_of_its_gradients(model: str) -> None:
    ((found, gradients),) = run_world(1, literal, config_of(model, 1), 4)
    assert found == [pytest.approx(expected(each, 1), rel=1e-9) for each in gradients]


LAYOUTS = {
    "tp2-sp": (2, 1, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, 1, "--pipeline-model-parallel-size 2"),
    "zb": (2, 1, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "dp2-overlap": (2, 2, "--overlap-grad-reduce"),
    "dp2-replicated": (2, 2, "--no-use-distributed-optimizer"),
    "zero2": (2, 2, "--data-parallel-sharding-strategy optim_grads"),
    "zero3": (2, 2, "--data-parallel-sharding-strategy optim_grads_params"),
    "tp2-dp2": (4, 2, "--tensor-model-parallel-size 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_measure_the_same(layout: str) -> None:
    world, replicas, flags = LAYOUTS[layout]
    ((_, gradients),) = run_world(1, literal, config_of("", 1), 3)
    wanted = [pytest.approx(expected(each, replicas), rel=1e-6) for each in gradients]
    assert run_world(world, measured, config_of(flags, world), 3) == [wanted] * world


def test_experts_count_with_the_samples_that_reach_them() -> None:
    """With two expert-parallel ranks, the estimate for an expert uses a small batch of two samples. For all other
    weights, the small batch has one sample."""
    ((_, gradients),) = run_world(1, literal, config_of(EXPERTS, 1), 3)
    found = run_world(2, measured, config_of(f"{EXPERTS} --expert-model-parallel-size 2", 2), 3)
    assert found[0] == found[1]
    for (noise, signal), each in zip(found[0], gradients, strict=True):
        mean = each.mean(dim=0).square().sum()
        assert noise > 0 and abs(signal) < float(mean) * 8


def test_a_frozen_model_has_the_noise_scale_of_the_definition() -> None:
    """The expected noise scale is tr(S) / |G|^2, computed from all gradients of 60 steps during which the weights stay
    the same."""
    ((found, gradients),) = run_world(1, literal, config_of("--lr 1e-30 --train-iters 61", 1), 61)
    every = torch.cat(gradients)
    spread = (every - every.mean(dim=0)).square().sum() / (len(every) - 1)
    signal = every.mean(dim=0).square().sum() - spread / len(every)
    window = Window(60)
    window.add(found)
    estimate = window.estimate()
    assert estimate is not None and abs(estimate.scale - float(spread / signal)) < 0.6 * (estimate.high - estimate.low)
    assert sum(noise for noise, _ in found) / len(found) == pytest.approx(float(spread), rel=0.1)


def test_a_run_logs_an_interval_and_resumes(tmp_path: Path) -> None:
    flags = f"{RUN} --train-iters 6 --save-interval 3 --log-interval 1 --save {tmp_path / 'run'}".split()
    run_forked(1, flags, tmp_path / "screen")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scales = [record["noise_scale"] for record in records if "noise_scale" in record]
    assert len(scales) == 6 and scales[:2] == [None, None]
    unknown = (tmp_path / "screen").read_text().count("noise scale: not yet known")
    assert unknown == scales.count(None)
    steps = [Checkpoint(tmp_path / "run" / f"iter_000000{n}").payload["callbacks"]["noise scale"] for n in (3, 6)]
    assert [len(each) for each in steps] == [2, 5] and steps[1][:2] == steps[0]
    resumed = [*flags, "--save", str(tmp_path / "on"), "--load", str(tmp_path / "run" / "iter_0000003")]
    run_forked(1, resumed, tmp_path / "screen-on")
    later = Checkpoint(tmp_path / "on" / "iter_0000006").payload["callbacks"]["noise scale"]
    # The first step of each start is not measured, because it only determines how many times each gradient is
    # accumulated.
    assert later == [*steps[1][:2], *steps[1][3:]]


@pytest.mark.parametrize(
    ("flags", "rule"),
    [("--micro-batch-size 8", "--micro-batch-size 8"), ("--context-parallel-size 2", "--log-noise-scale")],
)
def test_runs_that_cannot_be_measured_are_refused(flags: str, rule: str) -> None:
    problems = validate(parse_args(f"{RUN} {flags}".split()), 2 if "context" in flags else 1)
    assert [problem for problem in problems if rule in str(problem)], problems
