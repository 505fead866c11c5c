"""Counts of parameters, FLOPs and bytes against published models and against the model that is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.core.config.layers import Span
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.parameters import parameter_metas
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.stage_parameters import built_metas, count_parameters, stage_metas
from megatron.core.pipeline_parallel.stages import Stage
from tests import gpt_cases
from tests.extensions import installed

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_layer_freq": "2",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
}


def gqa(groups: int) -> dict[str, Any]:
    return {"group_query_attention": True, "num_query_groups": groups}


def shape(layers: int, hidden: int, heads: int, ffn: int, vocab: int, s: int = 4096) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "seq_length": s,
    }


PUBLISHED = {
    "GPT-2": (TransformerConfig(**shape(12, 768, 12, 3072, 50257, 1024), make_vocab_size_divisible_by=1), 124_439_808),
    "Llama-2-7B": (TransformerConfig(**shape(32, 4096, 32, 11008, 32000), **LLAMA), 6_738_415_616),
    "Llama-3-8B": (TransformerConfig(**shape(32, 4096, 32, 14336, 128256, 8192), **LLAMA, **gqa(8)), 8_030_261_248),
    "Mistral-7B": (TransformerConfig(**shape(32, 4096, 32, 14336, 32000), **LLAMA, **gqa(8)), 7_241_732_096),
    "Qwen2-0.5B": (
        TransformerConfig(
            **shape(24, 896, 14, 4864, 151936),
            **LLAMA | {"untie_embeddings_and_output_weights": False, "add_qkv_bias": True},
            **gqa(2),
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        TransformerConfig(
            **shape(28, 1024, 16, 3072, 151936),
            **LLAMA | {"untie_embeddings_and_output_weights": False, "qk_layernorm": True, "kv_channels": 128},
            **gqa(8),
        ),
        596_049_920,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert count_parameters(config).total == parameters


STYLES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {**LLAMA, **gqa(2)},
    "qwen": {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True, "squared_relu": True},
    "gemma": {
        "add_bias_linear": False,
        "activation_func": "geglu_tanh",
        "apply_layernorm_1p": True,
        "scale_word_embeddings": True,
    },
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True},
    "own heads": {
        **LLAMA,
        **gqa(2),
        "head_wise_attn_gate": True,
        "value_channels": 6,
        "window_size": 16,
        "window_attn_skip_freq": "2",
        "window_num_attention_heads": 6,
    },
    "gated with biases": {"swiglu": True, "qk_layernorm": True, "kv_channels": 24, "position_embedding_type": "none"},
    "gated attention": {**LLAMA, **gqa(2), "norm_placement": "sandwich", "attention_output_gate": True},
    "wide norms": {**LLAMA, "norm_placement": "output", "qk_layernorm": True, "qk_layernorm_scope": "all"},
    "yarn": {**LLAMA, "rope_type": "yarn", "rotary_scaling_factor": 4.0, "rotary_percent": 0.5},
    "multi-token": {**LLAMA, "mtp_num_layers": 2, "final_logit_softcapping": 30.0},
}
if installed("latent_attention"):
    WIDTHS = {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
    LATENT: dict[str, Any] = {"multi_latent_attention": True, **WIDTHS}
    STYLES["latent"] = {**LLAMA, **LATENT, "q_lora_rank": 12, "qk_layernorm": True}
    STYLES["latent, whole queries"] = {**LATENT, "position_embedding_type": "rope"}
if installed("linear_attention"):
    DELTA_NET: dict[str, Any] = {"experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 4}
    DELTA_NET |= {"linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
    STYLES["delta net"] = {**LLAMA, **DELTA_NET, "linear_attention_freq": "2"}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "gated shared expert": {**LLAMA, **EXPERTS, "moe_shared_expert_gate": True},
    "groups of experts": {
        **LLAMA,
        **EXPERTS,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
    },
}
CUTS = [(1, False, [range(4)]), (2, False, [range(4)]), (2, True, [range(4)])]
CUTS += [(2, True, [range(2), range(2, 4)]), (1, False, [range(0), range(3), range(3, 4)])]


@pytest.mark.parametrize("style", gpt_cases.STYLES)
@pytest.mark.parametrize(("tp", "sequence_parallel", "stages"), CUTS)
def test_parameters_are_those_of_the_built_model(
    style: str, tp: int, sequence_parallel: bool, stages: list[range]
) -> None:
    config = gpt_cases.STYLES[style]
    widths = config.ffn_hidden_size_pattern
    config = replace(config, num_layers=4, ffn_hidden_size_pattern=widths and f"{widths}*2")
    pp = len(stages)
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, sequence_parallel=sequence_parallel
    )
    for number, layers in enumerate(stages):
        axes = {"tp": Axis(None, 0, tp, tuple(range(tp))), "pp": Axis(None, number, pp, tuple(range(pp)))}
        state = ParallelState(ParallelDims(tp=tp, pp=pp), 0, axes)
        stage = Stage(layers, first=number == 0, last=number == pp - 1)
        tied = (0, pp - 1) if pp > 1 else ()
        ends = {"first": stage.first, "last": stage.last, "tied_stages": tied}
        model = GPTModel(config, parallel, state, layers=layers, **ends, device="meta", initialize=False)
        metas = stage_metas(config, stage, sequence_parallel=sequence_parallel, tied_stages=tied)
        assert [parameter.meta for parameter in model.parameters()] == metas
        assert built_metas(config, stage, sequence_parallel, tied) == metas
        for parameter, meta in zip(model.parameters(), metas, strict=True):
            assert tuple(parameter.shape) == meta.box({"tp": (0, tp)})[1], meta.name


def test_every_stage_together_holds_the_whole_model_once() -> None:
    config = TransformerConfig(**shape(7, 32, 4, 64, 300, 16))
    stages = [Stage(range(3), last=False), Stage(range(3, 7), first=False)]
    held = [meta for stage in stages for meta in stage_metas(config, stage, tied_stages=(0, 1))]
    names = [meta.name for meta in held]
    tied = [meta for meta in held if meta.shared_stages]
    assert [meta.name for meta in tied] == ["embedding.word_embeddings.weight"] * 2
    assert {meta.shared_stages for meta in tied} == {(0, 1)}
    assert set(names) == {meta.name for meta in parameter_metas(config)}
    assert len(names) == len(set(names)) + 1


@pytest.mark.parametrize("window", [1, 7, 31, 32])
def test_window_counts_what_is_seen(window: int) -> None:
    """The continuous count is the exact one up to half a token, as for the causal half of the square."""
    config = TransformerConfig(**shape(1, 8, 1, 8, 8, 32), window_size=window)
    exact = sum(min(i + 1, window) for i in range(32)) / 32
    assert config.layer(0).span.mean(32) == pytest.approx(exact, abs=0.5)
    assert TransformerConfig(**shape(1, 8, 1, 8, 8, 32)).layer(0).span.mean(32) == 16


@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 40])
def test_chunks_count_what_is_seen(chunk: int) -> None:
    exact = sum(i % chunk + 1 for i in range(32)) / 32
    assert Span(chunk=chunk).mean(32) == pytest.approx(exact, abs=0.5)
