"""Tests of the assignment of layers to pipeline stages and of stages to ranks."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import STAGE_SPLITS, ModelParallelConfig
from megatron.core.pipeline_parallel.layer_split import end_costs, pipeline_stages, stage_costs
from megatron.core.pipeline_parallel.layout import PipelineLayout, split_layers
from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(2, 5), st.sampled_from([0, 0.5, 1, 3]), st.sampled_from([0, 0.5, 1, 3]))
def test_no_split_has_a_cheaper_slowest_stage(num_layers, num_stages, first_cost, last_cost):
    def slowest(counts):
        ends = [first_cost] + [0] * (num_stages - 2) + [last_cost]
        return max(n + end for n, end in zip(counts, ends, strict=True))

    def compositions(total, parts):
        if parts == 1:
            return [[total]]
        return [[n, *rest] for n in range(total + 1) for rest in compositions(total - n, parts - 1)]

    got = [len(part) for part in split_layers(num_layers, num_stages, first_cost, last_cost)]
    assert slowest(got) == min(slowest(counts) for counts in compositions(num_layers, num_stages))


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        ((30, 4), {}, [7, 8, 8, 7]),
        ((7, 3), {}, [2, 3, 2]),
        ((2, 4), {}, [0, 1, 1, 0]),
        ((24, 4, 0, 10), {}, [8, 8, 8, 0]),
        ((30, 4), {"fixed": {0: 5}}, [5, 8, 9, 8]),
        ((30, 4), {"fixed": {0: 5, 3: 3}}, [5, 11, 11, 3]),
        ((27, 8, 0, 3), {"rank_of": PipelineLayout(4, 2).rank_of}, [3, 4, 4, 4, 4, 4, 4, 0]),
    ],
)
def test_stages_match_known_splits(args, options, expected):
    assert [len(part) for part in split_layers(*args, **options)] == expected


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 6), st.booleans())
def test_stages_and_positions_correspond_one_to_one(pp, chunks, v_shaped):
    layout = PipelineLayout(pp, chunks, v_shaped)
    places = [(layout.rank_of(stage), layout.chunk_of(stage)) for stage in range(layout.num_stages)]
    assert sorted(places) == [(rank, chunk) for rank in range(pp) for chunk in range(chunks)]
    assert [layout.stage_of(*place) for place in places] == list(range(layout.num_stages))
    for rank in range(pp):
        assert layout.stages_of(rank) == sorted(layout.stages_of(rank))
    for stage, following in pairwise(range(layout.num_stages)):
        distance = (layout.rank_of(following) - layout.rank_of(stage)) % pp
        assert distance in ((0, 1 % pp, pp - 1) if v_shaped else (1 % pp,))


def test_v_shape_turns_on_the_last_rank_and_ends_on_the_first():
    layout = PipelineLayout(4, 2, v_shaped=True)
    assert [layout.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_a_large_vocabulary_shortens_the_last_stage():
    config = TransformerConfig(num_layers=24, hidden_size=64, num_attention_heads=8, seq_length=128, vocab_size=8000)
    first, last = end_costs(config)
    assert first == 0 and 8 < last < 10
    assert [len(part) for part in split_layers(24, 4, first, last)] == [8, 8, 8, 0]


MODEL = TransformerConfig(num_layers=30, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=512)


def parallel(pp: int, **more: Any) -> ModelParallelConfig:
    return ModelParallelConfig(pipeline_model_parallel_size=pp, **more)


def counts(config: ModelParallelConfig, model: TransformerConfig = MODEL) -> list[int]:
    return [len(stage.layers) for stage in pipeline_stages(model, config)]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.sampled_from(tuple(PIPELINE_SCHEDULES)), st.integers(1, 5))
def test_any_number_of_layers_can_be_split(num_layers, pp, schedule, chunks):
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
def test_flags_determine_virtual_stages_and_the_schedule(flags: dict[str, Any], chunks: int, schedule: str) -> None:
    config = parallel(4, **flags)
    assert (pipeline_layout(MODEL, config).chunks, config.schedule) == (chunks, schedule)


def test_both_ends_hold_a_tied_embedding() -> None:
    def tied(pp: int, **flags: Any) -> tuple[int, ...]:
        return tied_stages(MODEL, pipeline_layout(MODEL, parallel(pp, **flags)))

    assert tied(1) == () and tied(4) == (0, 3)
    assert tied(4, num_virtual_stages_per_pipeline_rank=2) == (0, 7)
    assert tied(1, num_virtual_stages_per_pipeline_rank=2) == ()
    assert tied(4, pipeline_schedule="zb-v") == ()
    untied = replace(MODEL, untie_embeddings_and_output_weights=True)
    assert tied_stages(untied, pipeline_layout(untied, parallel(4))) == ()


class ByTimes:
    """Custom pipeline split that assigns only one layer to the first rank, as if this rank were slow."""

    @staticmethod
    def virtual(parallel: ModelParallelConfig) -> bool:
        return False

    @staticmethod
    def num_stages(model: TransformerConfig, parallel: ModelParallelConfig) -> int | None:
        return None

    @staticmethod
    def end_costs(parallel: ModelParallelConfig, first: float, last: float) -> tuple[float, float]:
        return first, 0.0

    @staticmethod
    def fixed(model: TransformerConfig, parallel: ModelParallelConfig, layout: PipelineLayout) -> dict[int, int]:
        return {0: 1}


def test_a_custom_split_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STAGE_SPLITS, "_entries", dict(STAGE_SPLITS._entries))
    STAGE_SPLITS.register("by times", ByTimes, when=lambda parallel: parallel.pipeline_model_parallel_size == 3)
    assert counts(parallel(2)) != [1, 29] and counts(parallel(3)) == [1, 15, 14]
