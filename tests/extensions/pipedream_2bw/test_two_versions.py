"""PipeDream-2BW computes W(t+1) = W(t) - lr g(W(t-1)) under every layout, even after a run is resumed. There is no
bubble between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.pipeline_parallel.actions import Kind, counterpart
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.extensions.pipeline.pipedream_2bw.continued_steps import ContinuedStep, ContinuingPipeline
from megatron.extensions.pipeline.pipedream_2bw.lists import lists_of_step
from megatron.extensions.pipeline.pipedream_2bw.two_versions import LateOptimizer
from megatron.extensions.plan.simulator.simulator import lists_of_steps, simulate
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.tasks import save
from megatron.training.train_step import StepInput, TrainStep, train_step
from tests.extensions import installed
from tests.harness import local_run, plant_nan, run_world, running

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --vocab-size 60 --lr 1e-2 --cpu "
    "--make-vocab-size-divisible-by 8 --mock-data --global-batch-size 8 --micro-batch-size 1 --train-iters 20 "
    "--weight-decay 0.1 --eval-iters 0 --num-workers 0 --lr-warmup-iters 3 --clip-grad 0.7 --log-interval 100 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)
SCHEDULE = "--pipeline-schedule 2bw"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
)
STEPS = 5


def config_of(flags: str, world_size: int) -> RunConfig:
    return resolve_legal(parse_args(f"{MODEL} {SCHEDULE} {flags}".split()), world_size)


def results(run: TrainingRun) -> tuple[list[float], list[float], list[bool]]:
    """Complete the update of the last step. Return the loss, the gradient norm and the skipped flag of each step so
    far."""
    run.guard.settle()
    losses = torch.stack(run.interval.losses)
    if dist.is_initialized():
        dist.all_reduce(losses)
    found = run.interval.results
    return (losses[:, 0] / losses[:, 1]).tolist(), [r.grad_norm for r in found], [r.skipped for r in found]


def trained(
    rank: int, world_size: int, config: RunConfig, nan_at: int = -1
) -> tuple[tuple[list[float], list[float], list[bool]], list[bool]]:
    """Train `STEPS` steps. Return the results and one boolean per step. The boolean is True if passes of the next step
    have already begun at the end of the step."""
    with local_run(config, rank, world_size) as run:
        plant_nan(run, nan_at)
        begun = []
        for _ in range(STEPS):
            train_step(run)
            begun.append(has_begun(run))
        found = results(run)
        drop_begun(run)
        return found, begun


def has_begun(run: TrainingRun) -> bool:
    """Return True if passes of the run's next step have already begun."""
    return isinstance(run.step, ContinuedStep) and run.step.begun is not None


def drop_begun(run: TrainingRun) -> None:
    """Discard passes of the next step that have already begun."""
    if isinstance(run.pipeline, ContinuingPipeline):
        run.pipeline.drop_begun()


def by_copies(rank: int, world_size: int, argv: Sequence[str]) -> tuple[list[float], list[float], list[bool]]:
    """Compute the steps of `trained` in a plain loop. Each gradient is computed with a copy of the weights before the
    last update."""
    with running(argv, rank, world_size) as run:
        params = [param.data for param in run.ddp.params]
        before = [param.clone() for param in params]
        for _ in range(STEPS):
            step = run.progress.next_step(run.batch_sizes)
            given = run.forward_backward.prepared(step, run.data.read_batches(step), 1.0)
            now = [param.clone() for param in params]
            torch._foreach_copy_(params, before)
            sums = run.forward_backward.gradients(given)
            torch._foreach_copy_(params, now)
            run.guard.settle()
            factor = reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
            result = TrainStep(run).update(step, sums, factor)
            run.guard.watch(step, result)
            run.interval.results.append(result)
            run.interval.losses.append(sums.loss_and_tokens)
            run.progress.iteration += 1
            run.progress.consumed_samples += step.samples
            before = now
        return results(run)


@pytest.mark.grid("model", [""], ["", EXPERTS])
def test_one_process_follows_the_formula(model: str) -> None:
    """The parity matrix (tests/parity) compares parallel layouts with one process."""
    plain = f"{MODEL} --fp64 {model}".split()
    (expected,) = run_world(1, by_copies, plain)
    assert run_world(1, trained, config_of(f"--fp64 {model}", 1)) == [(expected, [True] * STEPS)]
    (((losses, *_), _),) = run_world(1, trained, resolve_legal(parse_args(plain), 1))
    assert losses[:1] == expected[0][:1] and losses[2:] != expected[0][2:]


def parameters(run: TrainingRun) -> list[Tensor]:
    """Wait for all pending updates, and return the newest version of the weights."""
    run.guard.settle()
    run.optimizer.finish_param_sync()
    drop_begun(run)
    return [param.detach().clone() for param in run.ddp.params]


def saved(rank: int, world_size: int, config: RunConfig, folder: str) -> list[Tensor]:
    """Save a checkpoint after four steps, while the fifth step is in progress, and return the weights after eight
    steps."""
    saving = replace(config, checkpoint=replace(config.checkpoint, save=folder))
    with local_run(saving, rank, world_size) as run:
        for _ in range(4):
            train_step(run)
        assert has_begun(run)
        save(run)
        run.saver.finish()
        for _ in range(4):
            train_step(run)
        return parameters(run)


def resumed(rank: int, world_size: int, config: RunConfig, folder: str) -> tuple[list[Tensor], list[float]]:
    loading = replace(config, checkpoint=replace(config.checkpoint, load=folder))
    with local_run(loading, rank, world_size) as run:
        assert run.progress.iteration == 4
        for _ in range(4):
            train_step(run)
        losses, *_ = results(run)
        return parameters(run), losses


@pytest.mark.parametrize("precision", ["--bf16", "--fp64 --overlap-grad-reduce --overlap-param-gather"])
def test_a_checkpoint_has_both_versions(precision: str, tmp_path: Path) -> None:
    """Resuming under the same layout gives bit-identical results. Resuming under a different layout gives losses that
    agree to a relative tolerance of 1e-9."""
    ranks = 4 if "--fp64" in precision else 2
    config = config_of(f"--pp 2 {precision}", ranks)
    went_on = run_world(ranks, saved, config, str(tmp_path))
    again = run_world(ranks, resumed, config, str(tmp_path))
    for there, (here, _) in zip(went_on, again, strict=True):
        assert len(there) > 8 and all(map(torch.equal, there, here))
    if "--fp64" in precision:
        ((_, losses),) = run_world(1, resumed, config_of("--fp64", 1), str(tmp_path))
        assert losses == pytest.approx(again[0][1], rel=1e-9)
        folder = tmp_path / "one_version"
        run_world(2, goes_on, f"{MODEL} --fp64 --pp 2 --load {tmp_path} --save {folder}")
        run_world(2, goes_on, f"{MODEL} --fp64 --pp 2 --load {folder} {SCHEDULE}")


def goes_on(rank: int, world_size: int, flags: str) -> None:
    """Resume from a checkpoint with a different number of weight versions, take a step, and save a new checkpoint."""
    with running(flags.split(), rank, world_size) as run:
        assert run.progress.iteration in (4, 5)
        train_step(run)
        run.guard.settle()
        drop_begun(run)
        if run.config.checkpoint.save:
            save(run)
            run.saver.finish()


def test_a_nan_in_the_last_stage_alone_is_skipped_by_all() -> None:
    flags = "--fp64 --max-skipped-iterations 1"
    (((losses, norms, skipped), _),) = run_world(1, trained, config_of(flags, 1), 2)
    assert skipped == [False, False, True, False, False]
    for (found, found_norms, found_skipped), _ in run_world(2, trained, config_of(f"{flags} --pp 2", 2), 2):
        assert found_skipped == skipped and found == pytest.approx(losses, rel=1e-9)
        assert found_norms == pytest.approx(norms, rel=1e-9, nan_ok=True)


def evaluated(rank: int, world_size: int, config: RunConfig) -> tuple[list[float], list[float]]:
    """Return two lists of losses that the last stage computes on one batch: the losses of an evaluation with the newest
    weights, and the losses of the next training steps."""
    with local_run(config, rank, world_size) as run:
        for _ in range(3):
            train_step(run)
        run.guard.settle()
        step = run.progress.next_step(run.batch_sizes)
        with run.pipeline.evaluation_mode(), torch.no_grad():
            given: StepInput = run.forward_backward.prepared(step, run.data.read_batches(step), 1.0)
            own = run.pipeline.evaluate(given.scaled)
        for _ in range(2):
            train_step(run)
        losses, *_ = results(run)
        drop_begun(run)
        return torch.stack(own).flatten().tolist() if own else [], losses


def test_an_evaluation_during_training_uses_the_newest_weights() -> None:
    ((expected, losses),) = run_world(1, evaluated, config_of("--fp64", 1))
    ranks = run_world(2, evaluated, config_of("--fp64 --pp 2", 2))
    assert ranks[-1][0] == pytest.approx(expected, rel=1e-9)
    assert all(found == pytest.approx(losses, rel=1e-9) for _, found in ranks)


def thawed(rank: int, world_size: int, config: RunConfig, frozen: RunConfig, folder: str) -> list[float]:
    """For each parameter, return the largest difference between the two weight versions in a run that starts to train
    frozen parameters."""
    with local_run(replace(frozen, checkpoint=replace(config.checkpoint, save=folder)), rank, world_size) as run:
        for _ in range(3):
            train_step(run)
        save(run)
        run.saver.finish()
        drop_begun(run)
    other_seed = replace(config.training, seed=2)
    loading = replace(config.checkpoint, load=folder, load_rng=False, override_data_fingerprint=True)
    with local_run(replace(config, training=other_seed, checkpoint=loading), rank, world_size) as run:
        updates = run.optimizer
        assert isinstance(updates, LateOptimizer)
        pairs = zip(updates._newest, updates._previous, strict=True)
        return [(newest - previous).abs().max().item() for newest, previous in pairs]


def test_weights_without_an_older_version_start_from_the_newest(tmp_path: Path) -> None:
    pytest.importorskip("megatron.extensions.optim.optimizers", reason="its --freeze")

    def differences(world: int, flags: str) -> list[list[float]]:
        configs = (config_of(f"--fp64 {flags} {more}", world) for more in ("", "--freeze embedding"))
        return run_world(world, thawed, *configs, str(tmp_path / str(world)))

    for found in differences(2, "--pp 2"):
        assert max(found) < 0.02 and sum(difference > 0 for difference in found) > 0
    assert any(difference == 0 for difference in differences(1, "")[0])


@pytest.mark.skipif(not installed("diagnosis"), reason="diagnosis is deleted")
def test_a_step_with_layer_statistics_runs_alone() -> None:
    """A step with layer statistics starts and ends with an empty pipeline. The passes of such a step therefore do not
    begin in the previous step."""
    ranks = run_world(2, trained, config_of("--fp64 --pp 2 --log-layer-stats 3", 2))
    assert [begun for _, begun in ranks] == [[True, False, False, True, False]] * 2


SIZES = ([1] * 3, [2] * 3, [1, 2, 1], [1, 3, 2, 1])
"""Each case lists the numbers of micro-batches of consecutive steps, as multiples of the number of ranks."""


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("multiples", SIZES)
def test_consecutive_steps_run_as_one_long_step(p: int, multiples: list[int]) -> None:
    """The action lists do not deadlock even if sends and receives block. If the steps run one by one, every message is
    received in the step in which it is sent."""
    steps = [p * multiple + (number % 2) for number, multiple in enumerate(multiples)]
    lists = lists_of_steps("2bw", p, steps)
    passes = [[action for action in actions if action.kind in (Kind.F, Kind.B)] for actions in lists]
    assert passes == build_schedule("2bw", p, sum(steps))
    simulate(lists, rendezvous=True)
    own = [action for actions in lists_of_step("2bw", p, steps[0], steps[1], steps[2]) for action in actions]
    sends = [action for action in own if action.kind in (Kind.SEND_F, Kind.SEND_B)]
    receives = [action for action in own if action.kind in (Kind.RECV_F, Kind.RECV_B)]
    assert sorted(map(str, map(counterpart, sends))) == sorted(map(str, receives))
    assert sum(action.kind is Kind.VALIDATE for action in own) == p - 1


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("multiple", [1, 4])
def test_fifty_steps_have_no_bubble_between_the_first_and_the_last(p: int, multiple: int) -> None:
    found, m = simulate(lists_of_steps("2bw", p, [multiple * p] * 50)), multiple * p
    for timed in found.timeline:
        busy = [entry for entry in timed if entry.action.kind in (Kind.F, Kind.B)]
        between = [entry for entry in busy if 2 * 3 * m <= entry.start < 48 * 3 * m]
        assert len(between) > 90 * m
        assert all(entry.stop == after.start for entry, after in pairwise(between))
    # The 50 steps take as long as a single step with all their micro-batches. F takes time 1 and B takes time 2.
    assert found.makespan == 3 * (50 * m + p - 1)
    assert found.peak_activations == [float(p - rank) for rank in range(p)]


@pytest.mark.skipif(not installed("planner"), reason="the planner is deleted")
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 8)])
def test_the_plan_has_no_bubble(p: int, m: int) -> None:
    from megatron.extensions.plan.planner.time.pipeline import unflushed

    assert unflushed("2bw", p, m) == (3.0 * m, pytest.approx(0))
    time, _ = unflushed("2bw", p, m, tied=True)
    assert 3.0 * m < time <= simulate(build_schedule("1f1b", p, m)).makespan
