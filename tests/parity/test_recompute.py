"""Test that results with and without recomputation are bit-identical, for every choice of recomputed modules, and under
schedules that defer weight gradients."""

from __future__ import annotations

from functools import lru_cache

import pytest

from megatron.testing.snapshot import first_difference
from tests.harness import Snapshot, train_in_world
from tests.parity.matrix import settings
from tests.parity.matrix.combination import Combination

SPLIT = "world=4, tp=2sp, pp=2, schedule=zb-h1"
EXPERTS = "mlp=moe, routing=shared"
CASES = [
    *(f"world=1, recompute={parts}" for parts in ("selective", "mlp", "activations", "full uniform", "full block")),
    *(f"world=1, style=llama, recompute={parts}" for parts in ("mlp", "activations", "full uniform")),
    "world=1, style=no positions, recompute=activations",
    "world=1, heads=mla, style=llama, recompute=latents",
    *(f"world=1, layers=delta nets, recompute={parts}" for parts in ("selective", "full block")),
    *(f"world=1, {EXPERTS}, recompute={parts}" for parts in ("experts", "of experts", "full uniform")),
    *(f"{SPLIT}, recompute={parts}" for parts in ("selective", "activations", "full uniform")),
    f"{SPLIT}, style=llama, recompute=mlp",
    f"{SPLIT}, heads=mla, style=llama, recompute=latents",
    f"{SPLIT}, layers=delta nets, recompute=full block",
    *(f"{SPLIT}, {EXPERTS}, recompute={parts}" for parts in ("experts", "of experts")),
    *(f"world=2, pp=2, schedule=zb-v, optimizer=overlapped, recompute={parts}" for parts in ("mlp", "full block")),
    "world=2, cp=2ring, style=llama, recompute=full uniform",
    "world=2, cp=2ring, heads=mla, style=llama, recompute=latents",
]


@lru_cache
def trained(combination: Combination) -> Snapshot:
    with settings(combination):
        return train_in_world(combination.world_size, combination.argv, steps=1)


@pytest.mark.parametrize("case", [case for case in CASES if Combination.read(case).is_there])
def test_recomputation_changes_no_bit(case: str) -> None:
    combination = Combination.read(case)
    kept, found = trained(combination.changed("recompute", "none")), trained(combination)
    assert found.tensors.keys() == kept.tensors.keys()
    assert first_difference(kept, found, 0.0) is None
