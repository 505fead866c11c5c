"""What each pipeline stage of a configuration holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parts import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages, stage_costs, tied_stages

MODEL = TransformerConfig(num_layers=30, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=512)


def parallel(pp: int, **more: Any) -> ModelParallelConfig:
    return ModelParallelConfig(pipeline_model_parallel_size=pp, **more)


def counts(config: ModelParallelConfig, model: TransformerConfig = MODEL) -> list[int]:
    return [len(stage.layers) for stage in pipeline_stages(model, config)]


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 8),
    st.sampled_from(tuple(PIPELINE_SCHEDULES)),
    st.integers(1, 5),
)
def test_any_number_of_layers_on_any_stages(num_layers, pp, schedule, chunks):
    config = parallel(
        pp,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=chunks if schedule == "interleaved" else None,
    )
    model = replace(MODEL, num_layers=num_layers)
    layout, stages = pipeline_layout(model, config), pipeline_stages(model, config)
    assert len(stages) == layout.num_stages == pp * layout.chunks
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert sum(stage_costs(model, config)) >= num_layers
    middle = [len(stage.layers) for stage in stages[1:-1]]
    assert not middle or max(middle) - min(middle) <= 1


@pytest.mark.parametrize(
    ("flags", "chunks", "schedule"),
    [
        ({}, 1, "1f1b"),
        ({"num_virtual_stages_per_pipeline_rank": 3}, 3, "interleaved"),
        ({"num_layers_per_virtual_pipeline_stage": 5}, 2, "interleaved"),
        ({"num_layers_per_virtual_pipeline_stage": 8}, 1, "interleaved"),
        ({"pipeline_schedule": "interleaved"}, 2, "interleaved"),
        ({"pipeline_schedule": "zb-v"}, 2, "zb-v"),
        ({"pipeline_schedule": "zb-h1", "num_virtual_stages_per_pipeline_rank": 1}, 1, "zb-h1"),
    ],
)
def test_virtual_stages(flags: dict[str, Any], chunks: int, schedule: str) -> None:
    config = parallel(4, **flags)
    assert (pipeline_layout(MODEL, config).chunks, config.schedule) == (chunks, schedule)


def test_a_costly_head_leaves_the_last_stage_fewer_layers() -> None:
    model = replace(MODEL, vocab_size=12 * 64 * 4)  # as many parameters as four layers
    assert counts(parallel(4), model)[-1] == 5


def test_who_holds_a_tied_embedding() -> None:
    def tied(pp: int, **flags: Any) -> tuple[int, ...]:
        return tied_stages(MODEL, pipeline_layout(MODEL, parallel(pp, **flags)))

    assert tied(1) == () and tied(4) == (0, 3)
    assert tied(4, num_virtual_stages_per_pipeline_rank=2) == (0, 7)
    assert tied(1, num_virtual_stages_per_pipeline_rank=2) == ()
    assert tied(4, pipeline_schedule="zb-v") == ()
    untied = replace(MODEL, untie_embeddings_and_output_weights=True)
    assert tied_stages(untied, pipeline_layout(untied, parallel(4))) == ()
