"""Tests of a separate learning rate for the word embedding and the output layer. The parity matrix covers parallel
layouts."""

from __future__ import annotations

import pytest

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleLength
from tests.harness import train_in_world
from tests.tiny import TINY

MODEL = f"{TINY} --fp64 --attention-dropout 0 --hidden-dropout 0 "


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_only_the_embedding_and_output_layer_have_the_decoupled_rate(optimizer: str) -> None:
    """In the first step, there is no momentum yet, so the change of a parameter is proportional to the parameter's
    learning rate."""
    flags = MODEL + f"--untie-embeddings-and-output-weights --weight-decay 0 --clip-grad 0 --optimizer {optimizer} "
    plain, own = (train_in_world(1, (flags + more).split()) for more in ("", "--decoupled-lr 0.3"))
    for key, before in plain.tensors.items():
        if not key.startswith("initial weight "):
            continue
        name = key.removeprefix("initial weight ")
        change, own_change = (each.tensors[f"step 1 weight {name}"] - before for each in (plain, own))
        factor = 30 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 1
        assert own_change.allclose(change * factor, rtol=1e-9, atol=1e-12), name


def test_the_decoupled_rate_follows_the_schedule() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.0, decoupled_lr=3.0, decoupled_min_lr=1.0, lr_warmup_iters=10)
    scheduler = OptimizerParamScheduler(config, ScheduleLength(warmup=10, decay=110, anneal=0, total=110))
    assert [scheduler.decoupled_lr_at(samples) for samples in (5, 10, 60, 110)] == pytest.approx([1.5, 3.0, 2.0, 1.0])
    assert OptimizerParamScheduler(OptimizerConfig(lr=1.0), scheduler.length).decoupled_lr_at(5) is None
