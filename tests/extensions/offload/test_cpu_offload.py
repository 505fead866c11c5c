"""Tests of --optimizer-cpu-offload, which keeps optimizer states in host memory. Results are bit-identical, checkpoints
are the same, and the memory used on device and host equals the plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.distributed import param_layout
from megatron.core.distributed.param_layout import ALIGNMENT, place_states, plan_buffers
from megatron.core.optimizer.distrib_optimizer import Update
from megatron.core.optimizer.optimizer import MAIN_PARAM, Rates
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.extensions.memory.offload import host_update, placement
from megatron.testing.local_run import local_run
from megatron.testing.reshard import Checkpoints
from megatron.testing.snapshot import Snapshot, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.extensions import load_extensions
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.dist.toy import build, optimizer_config, run_step
from tests.extensions import needs
from tests.extensions.offload.late_copies import LateQueue
from tests.forked import ROOT
from tests.harness import run_world
from tests.tiny import TINY

MODEL = f"{TINY} --hidden-size 32 --vocab-size 64 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 "
OFFLOAD = "--optimizer-cpu-offload --optimizer-offload-fraction "
ZERO2, ZERO3 = (f"--data-parallel-sharding-strategy optim_grads{more}" for more in ("", "_params"))
AWARE = "--use-precision-aware-optimizer "


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the chunk size, so that the models of these tests have several chunks and reuse buffer slots."""
    monkeypatch.setattr(placement, "HOST_CHUNK", 1024)


@pytest.fixture(scope="module", autouse=True)
def extensions() -> None:
    load_extensions([str(ROOT / "examples" / "averaged_adam.py")])


def parse(flags: str) -> RunConfig:
    return parse_args(shlex.split(MODEL + flags))


def different(a: Snapshot, b: Snapshot) -> list[str]:
    assert a.tensors.keys() == b.tensors.keys() and not a.replica_errors and not b.replica_errors
    return [key for key in a.tensors if not torch.equal(a.tensors[key], b.tensors[key])]


RUNS = [
    (2, "--bf16 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000", 0.4),
    (1, "--fp32 --no-use-distributed-optimizer --no-pin-cpu-grads", 0.5),
    (2, f"--fp16 --initial-loss-scale 128 {ZERO2} --param-group 'fc1 lr_mult=0.1 weight_decay=0.3'", 1),
    (2, f"--bf16 {ZERO3} --decoupled-lr 1e-3 --no-pin-cpu-params", 0.7),
    (2, "--fp32 --optimizer sgd --clip-grad 0 --tp 2", 1),
    (1, f"--bf16 {AWARE}--main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16", 0.6),
    (1, f"--fp16 --initial-loss-scale 128 {AWARE}--main-params-dtype fp16 --exp-avg-dtype fp16", 1),
    (2, "--bf16 --optimizer averaged_adam --average-decay 0.5", 0.6),
    needs("fp8", 2, "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather --seq-length 16", 0.6),
]


@pytest.mark.parametrize(
    ("ranks", "flags", "fraction"),
    RUNS,
    ids=["overlapped", "replicated fp32", "ZeRO-2 fp16", "ZeRO-3", "sgd", "packed", "packed fp16", "chain", "fp8"],
)
def test_host_and_device_updates_are_bit_identical(ranks: int, flags: str, fraction: float) -> None:
    """Results can be bit-identical because, on a CPU, updates with and without offloading use the same kernels. The
    test compares loss, gradients, weights, main parameters and moments of two steps."""
    both = f"{MODEL}{flags}", f"{MODEL}{flags} {OFFLOAD}{fraction}"
    plain, offloaded = (train_in_world(ranks, shlex.split(each)) for each in both)
    assert len(plain.tensors) > 50 and different(plain, offloaded) == []


CHECKPOINTS = ["--fp32", f"--bf16 {AWARE}--exp-avg-dtype fp16", "--bf16 --optimizer averaged_adam"]


@pytest.mark.parametrize("flags", CHECKPOINTS)
def test_a_checkpoint_loads_with_every_fraction(flags: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.visit("half", 2, parse(f"{flags} {OFFLOAD}0.5"), train=True)
    checkpoints.visit("none", 1, parse(flags), train=True)
    for ranks, more in ((2, f"{OFFLOAD}0.9 {ZERO3}"), (1, "")):
        found = checkpoints.visit("loaded", ranks, parse(f"{flags} {more}"), ["half", "none"])
        assert found == {"half": [], "none": []}, more


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_load_rounds_parameters_as_an_update_does(fraction: float) -> None:
    """Main parameters halfway between two bf16 numbers are rounded away from zero, both on the device and on the
    host."""
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction} if fraction else {}
    ddp, optimizer = build(ParallelState(), dtype="bf16", use_precision_aware_optimizer=True, **offload)
    with optimizer.loading_state() as pieces:
        for piece in pieces:
            if piece.key == MAIN_PARAM:
                piece.data.view(torch.int32).fill_(0x3ACC8000)
    assert all(param.detach().view(torch.int16).eq(0x3ACD).all() for param in ddp.params)


def _skip_a_step(rank: int, world_size: int, flags: str) -> None:
    with local_run(resolve_legal(parse(flags), world_size), rank, world_size) as run:
        train_step(run)
        before, made = held(run), run.optimizer.step_count
        for buffer in run.ddp.buffers:
            buffer.grad_data[rank] = torch.nan
        assert run.optimizer.step(Update(Rates(1e-2, 0.1))).skipped and run.optimizer.step_count == made
        assert all(torch.equal(*pair) for pair in zip(held(run), before, strict=True))
        for buffer in run.ddp.buffers:
            buffer.grad_data.fill_(1e-3)
        assert not run.optimizer.step(Update(Rates(1e-2, 0.1))).skipped
        assert not any(torch.equal(*pair) for pair in zip(held(run), before, strict=True))


def held(run: TrainingRun) -> list[torch.Tensor]:
    """Return copies of all optimizer states and parameters."""
    found = [piece.data for piece in run.optimizer.sharded_state()] + [param.data for param in run.ddp.params]
    return [tensor.clone() for tensor in found]


PACKED = f"--bf16 {AWARE}--main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"


@pytest.mark.parametrize("flags", ["--bf16", PACKED], ids=["fp32", "packed"])
def test_a_skipped_step_changes_nothing_on_device_and_host(flags: str) -> None:
    run_world(1, _skip_a_step, f"{flags} {OFFLOAD}0.5 --disable-bias-linear")


def test_states_are_placed_by_the_fraction_and_in_order() -> None:
    """The optimizer states of the buckets that the backward pass completes first are in host memory. A rank's shard of
    such a bucket is split at multiples of `ALIGNMENT` into ranges of at most `HOST_CHUNK` elements."""
    metas = [(ParamMeta(f"layers.{i}.w", (30, 40), {}, role="hidden"), (30, 40)) for i in range(6)]
    metas += [(ParamMeta("norm.weight", (40,), {}, role="norm"), (40,))]
    for ranks in (1, 3):
        buffers = plan_buffers(metas, ranks, bucket_size=2400)
        for fraction in (0.0, 0.01, 0.5, 0.77, 1.0):
            config = optimizer_config(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
            found = place_states(buffers, config)
            covered: dict[tuple[int, int], int] = {}
            for place in found:
                assert place.start == covered.get((place.buffer, place.bucket), 0) and place.start % ALIGNMENT == 0
                covered[place.buffer, place.bucket] = place.stop
            every = [(b, k, bucket) for b, buffer in enumerate(buffers) for k, bucket in enumerate(buffer.buckets)]
            owned = {(b, k): (bucket.stop - bucket.start) // ranks for b, k, bucket in every}
            assert covered == owned
            sizes = [place.numel for place in found if place.on_host]
            assert abs(sum(sizes) - fraction * sum(owned.values())) <= ALIGNMENT / 2
            assert all(size <= placement.HOST_CHUNK for size in sizes)
            assert config.host_slots(sizes) == (
                min(placement.HOST_SLOTS, len(sizes)),
                max(sizes, default=0),
            )
            places = {place: {p.on_host for p in found if (p.buffer, p.bucket) == place} for place in owned}
            order = [places[place] for place in param_layout.launch_order(buffers)]
            assert order == sorted(order, key=lambda kinds: (True not in kinds, False in kinds))


@pytest.mark.parametrize("flags", ["--bf16 --overlap-param-gather", f"--fp32 {ZERO3} --optimizer sgd"])
def test_late_copies_do_not_change_results(flags: str) -> None:
    argv = shlex.split(f"{MODEL}{flags} {OFFLOAD}0.7")
    expected = train_in_world(2, argv)
    with mock.patch.object(host_update, "CopyQueue", LateQueue):
        assert different(expected, train_in_world(2, argv)) == []


def _threads_of_updates(rank: int, world_size: int) -> tuple[list[int], int]:
    state, seen = ParallelState(), []
    ddp, optimizer = build(state, dtype="bf16", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert optimizer.host_update is not None
    optimizer.host_update._threads = 3
    for chain in optimizer.host_update.chains:
        chain.step = lambda *args: seen.append(torch.get_num_threads())  # type: ignore[method-assign]
    run_step(ddp, optimizer, state, 0)
    return seen, torch.get_num_threads()


def test_the_host_update_uses_the_given_threads() -> None:
    ((seen, after),) = run_world(1, _threads_of_updates)
    assert seen and set(seen) == {3} and after == 1
