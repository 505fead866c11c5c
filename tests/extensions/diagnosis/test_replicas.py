"""Test that --check-replicas reports nothing in a healthy run and names the exact differences in a broken run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.extensions.observe.diagnosis.check_replicas import ReplicaError, bit_hash, check_replicas
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.harness import run_world, running
from tests.tiny import TINY

FLAGS = f"{TINY} --num-attention-heads 2 --vocab-size 30 --train-iters 3"


def _check(rank: int, world_size: int, argv: list[str], damage: Callable[[TrainingRun, int], None]) -> int | str:
    with running(argv, rank, world_size) as run:
        train_step(run)
        compared = check_replicas(run.stages.values(), run.optimizer, run.runtime.state)
        damage(run, rank)
        try:
            check_replicas(run.stages.values(), run.optimizer, run.runtime.state)
        except ReplicaError as error:
            return str(error)
        return compared


def _nothing(run: TrainingRun, rank: int) -> None:
    pass


def test_a_healthy_run_passes() -> None:
    compared = run_world(2, _check, FLAGS.split(), _nothing)
    assert all(isinstance(count, int) and count > 5 for count in compared), compared


def _flip_bit_of_norm(run: TrainingRun, rank: int) -> None:
    if rank == 3:
        weight = next(p for p in run.ddp.params if p.meta.name == "decoder.final_layernorm.weight")  # type: ignore[attr-defined]
        weight.data.view(torch.int32)[5] ^= 1


def test_one_flipped_bit_in_a_norm_is_detected_and_named() -> None:
    argv = [*FLAGS.split(), *"--tp 2 --pp 2 --sequence-parallel".split()]
    for message in run_world(4, _check, argv, _flip_bit_of_norm):
        assert "parameter decoder.final_layernorm.weight should be equal along tp" in message
        assert "1 of 16 elements differ, the first at (5,)" in message
        assert "rank 2: " in message and "rank 3: " in message


def _change_tied_embedding(run: TrainingRun, rank: int) -> None:
    if run.runtime.state.pp.last:
        run.ddp.params[-1].data[0, 0] += 1.0


def test_a_drifting_tied_embedding_is_detected() -> None:
    for message in run_world(2, _check, [*FLAGS.split(), "--pp", "2"], _change_tied_embedding):
        assert "parameter embedding.word_embeddings.weight should be equal along embd" in message


def _change_moment(run: TrainingRun, rank: int) -> None:
    if rank == 1:
        run.optimizer.sharded_state()[0].data[2] += 1e-3


def test_optimizer_state_is_compared_without_sharding() -> None:
    """Part of the optimizer state is offloaded to host memory. The test changes a first moment in the offloaded part on
    one rank."""
    offload = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.3"]
    argv = [*FLAGS.split(), "--no-use-distributed-optimizer", *offload]
    for message in run_world(2, _check, argv, _change_moment):
        assert message.startswith("exp_avg of ") and "along dp_cp" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hash_sees_every_bit_and_every_swap(dtype: torch.dtype) -> None:
    x = torch.randn(1000, dtype=dtype)
    x[3:5] = torch.tensor([1, 2])
    changed, swapped = x.clone(), x.clone()
    changed[7] = torch.nextafter(x[7].float(), torch.tensor(9.0)).to(dtype) if dtype != torch.bfloat16 else -x[7]
    swapped[[3, 4]] = swapped[[4, 3]]
    assert len({bit_hash(t).item() for t in (x, changed, swapped)}) == 3
    assert bit_hash(x).item() == bit_hash(x.clone()).item()
