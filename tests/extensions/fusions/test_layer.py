"""Where the fused layer stands in for the plain one, which the parity matrix compares."""

from __future__ import annotations

from typing import Any
from unittest import mock

from megatron.core import compiled_regions
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.layer import TransformerLayer
from megatron.extensions.fusions.flags import Fusions
from megatron.extensions.fusions.layer import FusedTransformerLayer
from megatron.testing.local_run import local_run
from megatron.training.train_step import train_step
from tests.extensions.unit_sharding.test_unit_sharding import Watch, sharding
from tests.extensions.unit_sharding.test_unit_sharding import config as config_of
from tests.gpt_cases import GPT
from tests.harness import run_world


def test_fused_layers_are_built_where_regions_are_compiled() -> None:
    compiled = ModelParallelConfig(compile=True)
    for config, parallel, kind in (
        (GPT, compiled, FusedTransformerLayer),
        (GPT, ModelParallelConfig(), TransformerLayer),
        (GPT.with_options(Fusions(fusions=False)), compiled, TransformerLayer),
    ):
        assert {type(layer) for layer in GPTModel(config, parallel).decoder.layers} == {kind}


def _streams(rank: int, world_size: int, flags: str) -> tuple[list[bool], tuple[int, int]]:
    """Whether each layer leaves its last addition to the next norm, and the most units that are whole at once."""
    with local_run(config_of(flags, world_size), rank, world_size) as run:
        train_step(run)
        watch = Watch(run)
        train_step(run)
        layers: Any = run.stages[0].decoder.layers  # type: ignore[union-attr]
        streams = [layer.takes_pending() for layer in layers]
        layers[0].register_forward_hook(lambda *seen: None)
        return [*streams, layers[0].takes_pending()], (watch.params, watch.grads)


def test_hooks_of_units_leave_additions_and_norms_fused() -> None:
    """The backward of a layer with two inputs and outputs begins and ends where that of a tensor does."""
    with mock.patch.object(compiled_regions, "_compiled", lambda function, static: function):
        found = run_world(2, _streams, f"--global-batch-size 6 --compile {sharding('optim_grads_params')}")
    assert found == [([True] * 4 + [False], (2, 2))] * 2
