"""Tests of flags that set the number of layers in pipeline stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.stages import pipeline_layout
from megatron.extensions.pipeline.pipeline_split.flags import SplitFlags
from megatron.extensions.pipeline.pipeline_split.layout_text import layers_of_stages
from tests.pure.test_layout import MODEL, counts

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LOSS, EMBEDDING = "account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split"


def parallel(pp: int, **more: Any) -> ModelParallelConfig:
    own = {name: more.pop(name) for name in list(more) if hasattr(SplitFlags, name)}
    return ModelParallelConfig(pipeline_model_parallel_size=pp, extension_options=(SplitFlags(**own),), **more)


ENDS = [
    ({FIRST: 5, LAST: 3}, [5, 11, 11, 3]),
    ({LAST: 0}, [10, 10, 10, 0]),
    ({"num_virtual_stages_per_pipeline_rank": 2, FIRST: 3}, [2, 4, 4, 5, 1, 5, 5, 4]),
    ({"pipeline_schedule": "zb-v", FIRST: 2, LAST: 1}, [2, 4, 4, 4, 5, 5, 5, 1]),
    ({LOSS: True}, [7, 8, 8, 7]),
]


@pytest.mark.parametrize(("flags", "expected"), ENDS)
def test_first_and_last_stages_can_be_set(flags: dict[str, Any], expected: list[int]) -> None:
    got = counts(parallel(4, **flags))
    assert sum(got) == 30
    assert got == expected


def test_an_end_can_count_as_one_layer() -> None:
    """The embedding and the output layer each count as one layer. A model with 30 layers therefore counts as 32 layers,
    which is 4 layers per stage on 8 stages."""
    assert counts(parallel(8, **{LOSS: True, EMBEDDING: True})) == [3, 4, 4, 4, 4, 4, 4, 3]


def test_a_costly_head_may_count_as_one_layer() -> None:
    model = replace(MODEL, vocab_size=12 * 64 * 4)  # the output layer has as many parameters as four layers
    assert counts(parallel(4, account_for_loss_in_pipeline_split=True), model)[-1] >= 7


TOO_MANY = [
    (4, {FIRST: 31}),
    (4, {FIRST: 20, LAST: 20}),
    (2, {FIRST: 10, LAST: 10}),
    (1, {FIRST: 10}),
    (1, {FIRST: 9, LAST: 9, "pipeline_schedule": "zb-v"}),
]


@pytest.mark.parametrize(("pp", "flags"), TOO_MANY)
def test_counts_that_do_not_fit_name_the_flag(pp: int, flags: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--decoder-first-pipeline-num-layers"):
        pipeline_stages(MODEL, parallel(pp, **flags))


STAGES = [
    ("Et*7|t*8|t*8|t*7L", 4, [7, 8, 8, 7]),
    ("Et*3|(tt|)*12,t*3|L", 1, [3, *[2] * 12, 3, 0]),
    ("E t*10 | (t*5|)*2 t*10 L", 4, [10, 5, 5, 10]),
    ("Ett|((t*3|)*2t|)*3t*7L", 1, [2, *[3, 3, 1] * 3, 7]),
    ("E|t*30||L", 4, [0, 30, 0, 0]),
]


@pytest.mark.parametrize(("text", "pp", "expected"), STAGES)
def test_layers_of_every_stage_can_be_set(text: str, pp: int, expected: list[int]) -> None:
    model = replace(MODEL, num_layers=sum(expected))
    config = parallel(pp, pipeline_model_parallel_layout=text)
    assert counts(config, model) == expected
    stages = pipeline_stages(model, config)
    assert [layer for stage in stages for layer in stage.layers] == list(range(model.num_layers))
    assert config.schedule == ("interleaved" if len(expected) > pp else "1f1b")
    assert pipeline_layout(model, config).chunks == len(expected) // pp


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_any_layer_counts_can_be_set(layers: list[int]) -> None:
    plain = "E" + "|".join("t" * count for count in layers) + "L"
    short = "E," + "|".join(f"(t)*{count}" for count in layers) + ",L"
    assert layers_of_stages(plain) == layers_of_stages(short) == tuple(layers)


UNREADABLE = {
    "must begin with E": ("", "t|tL", "tE|tL", "Et|Et|L"),
    "must end with L": ("Et|Lt", "Et|t"),
    "may contain m, multi-token prediction, only directly before L in the last stage": ("Et|m|L", "Etm|tL", "Et|mtL"),
    r"cannot be read at '\*\|L'": ("Et*|L",),
    "cannot be read at 'x": ("Ex|L",),
    r"has nothing before \*3 to repeat": ("*3EtL",),
    "does not close a group": ("E(t|L",),
    "closes a group that is not open": ("Et)|L",),
    "has more than 100000 symbols": ("E(t*9999)*9999L",),
}


@pytest.mark.parametrize("rule", UNREADABLE)
def test_unreadable_layouts_are_refused(rule: str) -> None:
    for text in UNREADABLE[rule]:
        with pytest.raises(ValueError, match=rule):
            layers_of_stages(text)
