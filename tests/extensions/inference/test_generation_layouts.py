"""Compare text that is generated under layouts with several ranks with text that one process generates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState, build_groups
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.extensions.use.inference.generation import Engine, Request, Sampling, StageRunner
from tests.extensions.inference.test_generation import MIXERS
from tests.gpt_cases import STYLES
from tests.harness import run_world
from tests.moe_cases import MIXTRAL

SAMPLED = Sampling(0.9, top_p=0.95, repetition_penalty=1.2)
REQUESTS = [
    Request([5, 9, 2], 6, seed=1, logprobs=2),
    Request([7], 9, SAMPLED, seed=2, logprobs=0),
    Request([1, 2, 3, 4, 5, 6], 3, seed=3, logprobs=2, prompt_logprobs=True),
    Request([4, 4], 7, SAMPLED, seed=2, logprobs=0),
    Request([5] * 15, 9, SAMPLED, logprobs=0),
]

Texts = list[tuple[list[int], list[float]]]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
BOTH = {TP: 2, PP: 2, "sequence_parallel": True}
CASES: list[Any] = [
    ("gpt", 2, {TP: 2}),
    ("gpt-oss", 2, {TP: 2, "sequence_parallel": True}),
    ("qwen2", 2, {PP: 2, "num_virtual_stages_per_pipeline_rank": 2}),
    *((style, 4, BOTH) for style in ("windows-in-some", *MIXERS)),
    ("moe", 4, BOTH | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
]


@pytest.mark.parametrize(("style", "ranks", "layout"), CASES)
def test_texts_of_a_layout_match_one_process(style: str, ranks: int, layout: dict[str, Any]) -> None:
    config = replace(MIXTRAL if style == "moe" else STYLES[style], num_layers=4, init_method_std=0.3)
    expected = texts(config, ModelParallelConfig(fp64=True), ParallelState())
    found = run_world(ranks, rank_texts, config, ModelParallelConfig(fp64=True, **layout))
    assert found[1:] == [[]] * (ranks - 1)
    for (tokens, logprobs), (other, others) in zip(found[0], expected, strict=True):
        assert tokens == other
        assert logprobs == pytest.approx(others, abs=1e-12)


def rank_texts(rank: int, world_size: int, config: TransformerConfig, parallel: ModelParallelConfig) -> Texts:
    return texts(config, parallel, build_groups(parallel))


def texts(config: TransformerConfig, parallel: ModelParallelConfig, state: ParallelState) -> Texts:
    """Return the generated texts on the rank that leads the generation, and an empty list on all other ranks."""
    layout, stages = pipeline_layout(config, parallel), pipeline_stages(config, parallel)
    tied = tied_stages(config, layout)
    models = {
        stage: GPTModel(config, parallel, state, replace(stages[stage], tied_stages=tied)).eval()
        for stage in layout.stages_of(state.pp.rank)
    }
    runner = StageRunner(models, state, layout, state.world)
    if not runner.leads:
        runner.follow()
        return []
    engine = Engine(runner, rows=3)
    found = list(engine.run(REQUESTS))
    engine.beat()
    engine.stop()
    return [(each.tokens, [part.logprob for part in each.prompt_logprobs + each.logprobs]) for each in found]
