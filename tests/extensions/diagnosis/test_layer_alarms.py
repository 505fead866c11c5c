"""Tests of the alarm rules on synthetic series of statistics. An alarm names a layer or a tensor-parallel rank."""

from __future__ import annotations

import math
import random

import pytest

from megatron.extensions.observe.diagnosis.layer_stats.alarms import (
    WINDOW,
    GrowthRule,
    LayerAlarms,
    LayerRecord,
    Parameter,
)


def series(dice: random.Random, noise: float, trend: float) -> list[dict[int, float]]:
    """Return 150 records with one value for each of 8 layers. The values have different magnitudes and grow from record
    to record, with noise between records and between layers."""
    sizes = [(layer, dice.uniform(0.1, 10)) for layer in range(8)]
    return [{n: size * (1 + trend) ** t * math.exp(dice.gauss(0, noise)) for n, size in sizes} for t in range(150)]


@pytest.mark.parametrize("noise", [0.0001, 0.01, 0.02])
@pytest.mark.parametrize("trend", [0.0, 0.05])
def test_a_layer_that_grows_by_five_percent_per_record_is_named(noise: float, trend: float) -> None:
    for seed in range(10):
        dice = random.Random(seed)
        layer, first = dice.randrange(8), dice.randrange(60, 130)
        rule, found = GrowthRule[int](1.2, 40), []
        for t, values in enumerate(series(dice, noise, trend)):
            if t >= first:
                values[layer] *= 1.05 ** (t - first + 1)
            found += [(t, name, growth.factor) for name, growth in rule.add(values).items()]
        ((at, name, factor),) = found
        assert name == layer and first <= at < first + 10 and factor > 1.2


@pytest.mark.parametrize("noise", [0.0001, 0.01, 0.1, 0.5])
def test_noise_and_growth_of_all_layers_raise_no_alarm(noise: float) -> None:
    for seed in range(5):
        rule = GrowthRule[int](1.2, 40)
        assert not any(rule.add(values) for values in series(random.Random(seed), noise, 0.05))


def test_a_missing_value_restarts_the_rule_of_a_layer() -> None:
    rule = GrowthRule[int](1.2, 10)
    for t in range(30):
        values = dict.fromkeys(range(4), 1.0) | ({3: 0.0} if t == 15 else {})
        assert rule.add(values) == {}
    assert [len(rule._tracks[n].slopes) for n in (0, 3)] == [30 - WINDOW + 1, 14 - WINDOW + 1]


def shards(iteration: int, weights: list[float], sharded: bool, init: str = "normal") -> LayerRecord:
    record = LayerRecord(iteration)
    for quantity in ("weight_norm", "grad_norm", "update_norm"):
        parameter = Parameter(None, False, sharded, init)
        record.add_parameter("p", parameter, quantity, [weight**2 for weight in weights])
    return record


def test_replicas_must_be_equal_and_shards_must_differ() -> None:
    for sharded, weights, said in (
        (False, [1.0, 1.0], ""),
        (False, [1.0, 1.0001], "p should be equal on all tensor-parallel ranks, but is not"),
        (True, [1.0, 1.0001, 1.1], ""),
        (True, [1.0, 1.1, 1.0], "tensor-parallel ranks 0 and 2 hold parts of p with the same norm"),
    ):
        rules = LayerAlarms(1.2)
        told = [line for iteration in (7, 8) for line in rules.judge(shards(iteration, weights, sharded))]
        assert len(told) == bool(said) and all(line.startswith(f"iteration 7: {said}") for line in told)
    assert LayerAlarms(1.2).judge(shards(1, [1.0, 1.0], True, init="ones")) == []
    assert LayerAlarms(0.0).judge(shards(1, [1.0, 1.0], True)) == []


def test_statistics_are_recorded_under_tags() -> None:
    record = LayerRecord(5)
    for layer in (0, 1):
        for name in ("a", "b"):
            facts = Parameter(layer, False, False, "normal")
            record.add_parameter(f"decoder.layers.{layer}.{name}", facts, "grad_norm", [9.0 + 7.0 * layer])
        record.add_layer("output_rms", layer, 2.0 + layer)
    record.add_layer("expert_load", 1, [0.5, 1.5])
    record.add_gains()
    found = record.as_json()
    assert found["layers"] == {
        "layer": [0, 1],
        "expert_load": [None, [0.5, 1.5]],
        "grad_norm": [pytest.approx(18**0.5), pytest.approx(32**0.5)],
        "output_gain": [None, 1.5],
        "output_rms": [2.0, 3.0],
    }
    assert found["parameters"]["decoder.layers.1.b"] == {"grad_norm": 4.0}
