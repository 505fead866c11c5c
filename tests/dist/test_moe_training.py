"""Tests of mixture-of-experts models in the training loop. The tests cover the logged values, multi-token prediction
and 16-bit training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.testing.snapshot import first_difference, relative_difference, train_in_world
from tests.harness import run_world, train_to_the_end
from tests.tiny import TINY

BASE = (
    f"{TINY} --num-layers 3 --hidden-size 32 --seq-length 16 --vocab-size 100 --global-batch-size 8 --eval-iters 1 "
    "--eval-interval 3 --disable-bias-linear --swiglu --num-experts 8 --moe-ffn-hidden-size 24 "
    "--moe-layer-freq [0,1,1] --moe-aux-loss-coeff 0.1 "
)
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-z-loss-coeff 0.01 "
LAYOUTS = {
    "one": (1, ""),
    "ep2": (4, "--ep 2 --moe-token-dispatcher-type alltoall"),
    "tp2-pp2": (4, "--tp 2 --sequence-parallel --pp 2 --etp 1"),
    "pp2-cp2": (4, "--pp 2 --cp 2"),
}


def records(layout: str, folder: Path, flags: str) -> list[dict[str, Any]]:
    world_size, of_layout = LAYOUTS[layout]
    run_world(world_size, train_to_the_end, f"{BASE} {of_layout} {flags} --save {folder}".split())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "lm_loss" in record]


def test_load_and_losses_are_logged_alike_under_every_layout(tmp_path: Path) -> None:
    """The logged values also cover the multi-token prediction layers. Each sample consists of several documents."""
    flags = f"{SIGMOID} --fp64 --log-interval 2 --moe-expert-capacity-factor 0.8 --moe-per-layer-logging "
    flags += "--vocab-size 12 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7 --tokenizer-type NullTokenizer "
    flags += "--reset-attention-mask --reset-position-ids --eod-mask-loss"
    first, *others = (records(layout, tmp_path / layout, flags) for layout in LAYOUTS)
    keys = [key for key in first[0] if key.startswith(("moe_", "mtp_", "lm_loss"))]
    assert len(first) == 2 and len({first[0][key] for key in ("lm_loss", "mtp_loss_1", "mtp_loss_2")}) == 3
    for record in first:
        load = record["moe_load_of_layer"]
        assert list(load) == ["1", "2", "3", "4"]  # the two decoder layers and the two multi-token prediction layers
        assert all(len(row) == 8 and sum(row) == pytest.approx(8, abs=1e-3) for row in load.values())
        assert record["moe_load_max"] == pytest.approx(max(map(max, load.values())), abs=1e-4)
        assert record["moe_load_min"] == pytest.approx(min(map(min, load.values())), abs=1e-4)
        assert record["moe_load"] == pytest.approx(
            [sum(layers) / 4 for layers in zip(*load.values(), strict=True)], abs=1e-4
        )
        assert 0 < record["moe_dropped"] < 1
        assert record["moe_z_loss"] > 0
    assert all(0.9 < record["moe_aux_loss"] < 2 for record in first)  # the loss is 1 if all experts have the same load
    for (world_size, _), (record, _) in zip(LAYOUTS.values(), (first, *others), strict=True):
        flops_of_token = world_size * record["tflops_per_device"] / record["tokens_per_second"]
        assert flops_of_token == pytest.approx(first[0]["tflops_per_device"] / first[0]["tokens_per_second"])
    for other in others:
        assert [list(record) for record in other] == [list(record) for record in first]
        for mine, theirs in zip(first, other, strict=True):
            for key in keys:
                assert theirs[key] == (
                    mine[key] if isinstance(mine[key], dict) else pytest.approx(mine[key], rel=1e-9)
                ), key


@pytest.mark.parametrize("precision", ["--fp16 --initial-loss-scale 4096", "--bf16", "--fp32"])
def test_auxiliary_gradients_have_the_scale_of_the_other_gradients(precision: str) -> None:
    """In fp16, the initial gradient of the backward pass is the loss scale divided by the sequence length."""
    flags = f"{BASE} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 3"
    expected = train_in_world(1, f"{flags} --fp64".split(), steps=1)
    found = train_in_world(2, f"{flags} {precision} --ep 2".split(), steps=1)
    for layer in (1, 2):
        key = f"step 1 gradient decoder.layers.{layer}.mlp.router.weight"
        assert relative_difference(found[key].double(), expected[key]) < (1e-4 if precision == "--fp32" else 0.1)


def test_tokens_with_equal_inputs_are_dropped_by_position() -> None:
    """The vocabulary has ten words and each token attends to two tokens, so many router probabilities are equal up to
    rounding."""
    model = f"{BASE} --fp64 --vocab-size 10 --num-experts 4 --moe-expert-capacity-factor 0.8 --window-size 2 "
    model += "--position-embedding-type none --attention-dropout 0 --hidden-dropout 0 --global-batch-size 4 --seed 2 "
    model += "--seq-length 32 "
    expected = train_in_world(1, model.split())
    assert first_difference(expected, train_in_world(2, (model + "--cp 2").split()), 1e-9) is None
