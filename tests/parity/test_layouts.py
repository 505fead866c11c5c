"""Layouts against one process: the same model, to rounding, through the real training step.

Every weight, gradient, moment, loss and gradient norm of two steps is compared as a global tensor. Dropout is on,
the batch is cut differently at every layout, and embeddings are tied or not.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from megatron.testing.parity import weights_hash
from megatron.testing.snapshot import first_difference
from tests.harness import Snapshot, train_in_world

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --weight-decay 0.1 --mock-data --global-batch-size 12 "
    "--train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)
STYLES = {
    "gpt": COMMON,
    "llama": COMMON
    + " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0"
    " --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --attention-dropout 0",
    "qwen": COMMON
    + " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias"
    " --qk-layernorm --window-size 5 --num-layers 7",
}
LAYOUTS = [
    (2, "--tp 2"),
    (2, "--tp 2 --sequence-parallel"),
    (4, "--tp 2 --pp 2 --sequence-parallel"),
    (4, "--pp 4"),
    (4, "--pp 4 --pipeline-schedule gpipe --micro-batch-size 3"),
    (3, "--pp 3"),
    (4, "--dp 4"),
    (3, "--dp 3 --no-use-distributed-optimizer --micro-batch-size 2"),
    (8, "--tp 2 --pp 2 --dp 2"),
    (8, "--tp 2 --pp 2 --dp 2 --use-tp-pp-dp-mapping --micro-batch-size 2"),
    (8, "--tp 2 --pp 4 --no-use-distributed-optimizer"),
]


@lru_cache(None)
def trained(style: str, world_size: int = 1, layout: str = "") -> Snapshot:
    return train_in_world(world_size, [*STYLES[style].split(), *layout.split()])


PAIRS = {f"{style} {flags.replace('--', '')}": (style, size, flags) for size, flags in LAYOUTS for style in STYLES}
PART = [name for number, name in enumerate(PAIRS) if name.startswith("gpt") or number % 2]
"""The first style everywhere, as another test needs it, and one of the others at each layout."""


@pytest.mark.grid("pair", PART, list(PAIRS))
def test_layout_computes_what_one_process_does(pair: str) -> None:
    style, world_size, layout = PAIRS[pair]
    snapshot = trained(style, world_size, layout)
    assert not snapshot.replica_errors
    assert first_difference(trained(style), snapshot, tolerance=1e-9) is None


UNTRAINED = [
    (4, "--pp 2 --pipeline-schedule zb-v"),
    (2, "--pp 2 --num-virtual-stages-per-pipeline-rank 2"),
    (2, "--cp 2"),
    (4, "--tp 4"),
]


def test_initial_weights_are_bit_identical() -> None:
    """Of the whole model, put together from every layout's shards."""
    assert sum(key.startswith("initial weight") for key in trained("gpt").tensors) > 40
    expected = weights_hash(trained("gpt"))
    snapshots = {layout: trained("gpt", size, layout) for size, layout in LAYOUTS}
    for world_size, layout in UNTRAINED:
        snapshots[layout] = train_in_world(world_size, [*STYLES["gpt"].split(), *layout.split()], steps=0)
    for layout, snapshot in snapshots.items():
        assert not snapshot.replica_errors
        assert weights_hash(snapshot) == expected, layout


def test_two_runs_of_one_command_are_bitwise_equal() -> None:
    layout = "--tp 2 --pp 2 --sequence-parallel"
    first, second = (runs("gpt", 4, layout) for runs in (trained, trained.__wrapped__))
    for key, value in first.tensors.items():
        assert torch.equal(value, second[key]), key
