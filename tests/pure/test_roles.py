"""Tests of the roles of parameters, and of initial values that depend on the role of a parameter."""

from __future__ import annotations

from dataclasses import replace
from math import prod, sqrt

import pytest

from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.param_meta import Init, InitPolicy, ParamMeta
from tests.gpt_cases import GPT, STYLES, model_of

ON_META = WeightSetup("meta", initialize=False)


def metas_of(name: str) -> dict[str, ParamMeta]:
    return {name: meta for name, (_, meta) in GPTModel(model_of(name), weights=ON_META).named_metas().items()}


@pytest.mark.parametrize("style", STYLES)
def test_fans_divide_each_matrix_of_every_model(style: str) -> None:
    for name, meta in metas_of(style).items():
        stacked = prod(meta.global_shape[: meta.stacked])
        if meta.width_kind in ("hidden", "output"):
            assert meta.matrix and meta.fan_in * meta.fan_out * stacked == meta.numel, name
        elif meta.width_kind == "vector":
            assert meta.role == "convolution" or not meta.matrix, name
        assert meta.init is not None, name


def test_metas_have_the_facts_that_a_parametrization_needs() -> None:
    metas, hidden, layer = metas_of("llama"), model_of("llama").hidden_size, "decoder.layers.1"
    fc1, fc2 = metas[f"{layer}.mlp.linear_fc1.weight"], metas[f"{layer}.mlp.linear_fc2.weight"]
    assert (fc1.role, fc1.fan_in, fc1.fan_out, fc1.layer, fc1.to_residual) == ("hidden", hidden, 96, 1, False)
    assert (fc2.fan_in, fc2.fan_out, fc2.to_residual) == (48, hidden, True)
    norm = metas[f"{layer}.input_layernorm.weight"]
    assert (norm.role, norm.width_kind, norm.fan_in, norm.fan_out) == ("norm", "vector", 1, hidden)
    embedding, output = metas["embedding.word_embeddings.weight"], metas["output_layer.weight"]
    assert (embedding.width_kind, embedding.fan_in, embedding.fan_out) == ("input", 1, hidden)
    assert (output.width_kind, output.fan_in, output.layer, embedding.tied) == ("output", hidden, None, False)
    assert metas_of("gpt")["embedding.word_embeddings.weight"].tied


def test_initial_values_follow_from_the_role() -> None:
    config = replace(GPT, num_layers=8, init_method_std=0.1, embedding_init_method_std=0.3)
    metas = {name: meta for name, (_, meta) in GPTModel(config, weights=ON_META).named_metas().items()}
    layer = "decoder.layers.0"
    for name, init in {
        "embedding.word_embeddings.weight": Init("normal", 0.3),
        f"{layer}.self_attention.linear_qkv.weight": Init("normal", 0.1),
        f"{layer}.self_attention.linear_proj.weight": Init("normal", 0.1 / sqrt(16)),
        f"{layer}.mlp.linear_fc2.bias": Init("zeros"),
        f"{layer}.input_layernorm.weight": Init("ones"),
    }.items():
        assert metas[name].init == init, name


def test_a_role_without_default_initial_values_must_state_them() -> None:
    with pytest.raises(ValueError, match=r"the role 'vector' has no initial values; set `init` of its ParamMeta"):
        InitPolicy().complete(ParamMeta("a.scale", (1,), role="vector"))
    with pytest.raises(ValueError, match=r"a\.scale: role 'norms' is none of embedding, hidden, "):
        ParamMeta("a.scale", (1,), role="norms")  # type: ignore[arg-type]
