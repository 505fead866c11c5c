"""The plan of a run without phases, and what a resumed run keeps of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.saved_flags import changed_lengths
from megatron.training.config.validation import resolve
from megatron.training.plan import History, plan_of

GOOD = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3 --global-batch-size 8 "
    "--position-embedding-type rope"
)


def test_a_run_of_one_phase() -> None:
    config = resolve(parse_args([*GOOD.split(), "--mock-data", "--train-iters", "20"]), 1)
    plan = plan_of(config)
    assert (plan.samples, plan.iterations, plan.tokens(40)) == (160, 20, 640)
    assert plan.longest is plan.trained(160) is plan.at(10**9) is plan.phases[0] and plan.phases[0].config is config
    assert plan.schedule().lr_at(80) == pytest.approx(5e-4)
    assert plan.record(8) == [{"name": "", "first_sample": 0, "planned": [160], "values": None}]


def test_the_order_of_samples_stays_when_a_run_becomes_longer() -> None:
    config = resolve(parse_args([*GOOD.split(), "--mock-data", "--train-samples", "400"]), 1)
    history = History(96, plan_of(config).record(96))
    longer = plan_of(replace(config, training=replace(config.training, train_samples=900)))
    assert longer.continued(history).phases[0].lengths == (400, 900)
    begun = replace(history, phases=[*history.phases, {"name": "long", "first_sample": 80, "planned": [20]}])
    with pytest.raises(ValueError, match="--load: the checkpoint's run has begun phase long, which is missing; give"):
        longer.continued(begun)


def test_flags_that_make_a_run_longer_are_told() -> None:
    before, now = (
        parse_args([*GOOD.split(), "--mock-data", *more.split()]) for more in ("--train-iters 9", "--train-iters 20")
    )
    assert changed_lengths(before, before) is None
    line = changed_lengths(before, now) or ""
    assert line.startswith("changed since the checkpoint: --train-iters 9 -> 20; samples") and "new end" in line
    fixed = replace(now, optimizer=replace(now.optimizer, lr_decay_iters=9))
    assert changed_lengths(before, fixed) == (
        "changed since the checkpoint: --lr-decay-iters not given -> 9, --train-iters 9 -> 20; samples continue in the "
        "order that was begun"
    )
