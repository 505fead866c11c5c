"""Compare computed numbers of parameters, FLOPs and bytes with published models and with models that are built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.core.config.layers import Span
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.stage_parameters import count_parameters, stage_metas
from tests import gpt_cases
from tests.extensions import installed

TABLE = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "counted_styles.yaml").read_text())
NEEDS = {"latent": "latent_attention", "delta net": "linear_attention"}
STYLES: dict[str, dict[str, Any]] = {
    name: fields
    for name, fields in TABLE["styles"].items()
    if (start := name.split(",")[0]) not in NEEDS or installed(NEEDS[start])
}
WITH_EXPERTS: dict[str, dict[str, Any]] = TABLE["with experts"]
LLAMA, DELTA_NET = TABLE["shared"]["llama"], TABLE["shared"]["delta net"]


def shape(layers: int, hidden: int, heads: int, ffn: int, vocab: int, s: int = 4096) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "seq_length": s,
    }


PUBLISHED = {name: (TransformerConfig(**fields), count) for name, (count, fields) in TABLE["published"].items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_match_published_models(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert count_parameters(config).total == parameters


CUTS = [(1, False, [range(4)]), (2, False, [range(4)]), (2, True, [range(4)])]
CUTS += [(2, True, [range(2), range(2, 4)]), (1, False, [range(0), range(3), range(3, 4)])]


@pytest.mark.parametrize("style", gpt_cases.STYLES)
@pytest.mark.parametrize(("tp", "sequence_parallel", "stages"), CUTS)
def test_parameter_counts_match_real_models(style: str, tp: int, sequence_parallel: bool, stages: list[range]) -> None:
    config = gpt_cases.STYLES[style]
    widths = config.ffn_hidden_size_pattern and str([(2 * config.ffn_sizes)[layer] for layer in range(4)])
    config = replace(config, num_layers=4, ffn_hidden_size_pattern=widths)
    pp = len(stages)
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sequence_parallel
    )
    for number, layers in enumerate(stages):
        axes = {"tp": Axis(None, 0, tp, tuple(range(tp))), "pp": Axis(None, number, pp, tuple(range(pp)))}
        state = ParallelState(ParallelDims(tp=tp, pp=pp), 0, axes)
        stage = Stage(layers, first=number == 0, last=number == pp - 1)
        tied = (0, pp - 1) if pp > 1 else ()
        whole = replace(stage, tied_stages=tied)
        model = GPTModel(config, parallel, state, whole, weights=WeightSetup("meta", initialize=False))
        metas = stage_metas(config, stage, sequence_parallel=sequence_parallel, tied_stages=tied)
        assert [parameter.meta for parameter in model.parameters()] == metas
        for parameter, meta in zip(model.parameters(), metas, strict=True):
            assert tuple(parameter.shape) == meta.box({"tp": (0, tp)})[1], meta.name


SPANS = [*(Span(window=tokens) for tokens in (1, 7, 31, 32)), *(Span(chunk=tokens) for tokens in (1, 7, 16, 32, 40))]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_spans_count_visible_keys(span: Span) -> None:
    """The approximation of the mean number of visible keys differs from the exact number by at most half a token. For
    causal attention, the approximation is half the sequence length."""
    exact = sum(min(i % (span.chunk or 32) + 1, span.window or 32) for i in range(32)) / 32
    assert span.mean(32) == pytest.approx(exact, abs=0.5) and Span().mean(32) == 16
