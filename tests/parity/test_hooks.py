"""Test that custom components, such as layers and callbacks, compute the same results under every layout."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from megatron.testing.snapshot import first_difference
from tests.harness import Snapshot, train_in_world
from tests.tiny import TINY

EXTENSION = Path(__file__).parents[1] / "fixtures" / "own_parts.py"
MODEL = f"{TINY} --num-layers 4 --fp64 --attention-dropout 0 --hidden-dropout 0 --extension {EXTENSION} "
OWN = (
    MODEL + "--no-mock-data --dataset-type own_data --normalization own_norm --activation-func own_activation "
    "--loss-func own_loss --optimizer own_optimizer --lr-decay-style own_schedule --pipeline-schedule own_pipeline "
)
MODULES = MODEL + "--attention-module own_attention --layer-module own_layer --normalization RMSNorm "
EXPERTS = (
    MODEL + "--activation-func own_gated --num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear "
    "--moe-shared-expert-intermediate-size 16 --recompute-granularity selective --recompute-modules moe_act "
)
SPLIT = "--tp 2 --sequence-parallel --pp 2"
CASES = [*((flags, *layout) for flags in (OWN, MODULES) for layout in ((4, SPLIT), (2, "--cp 2")))]
CASES += [(EXPERTS, 4, "--tp 2 --sequence-parallel --ep 2"), (EXPERTS, 4, "--pp 2 --cp 2")]


@lru_cache
def alone(flags: str) -> Snapshot:
    return train_in_world(1, flags.split())


@pytest.mark.parametrize(("flags", "ranks", "layout"), CASES)
def test_every_layout_computes_the_same_as_one_process(flags: str, ranks: int, layout: str) -> None:
    found = train_in_world(ranks, (flags + layout).split())
    assert found.replica_errors == []
    assert first_difference(alone(flags), found, 1e-9) is None


def test_custom_modules_replace_built_in_ones() -> None:
    found = {key.removeprefix("initial weight decoder.layers.0.") for key in alone(MODULES).tensors}
    assert {"own_norm.weight", "self_attention.own_norm.weight", "mlp.own_fc1.weight", "mlp.own_fc2.bias"} <= found
    assert "mlp.linear_fc1.weight" not in found
