"""Parts of decoders that families combine, against formulas written down from their papers and published models."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.gpt_cases import FP64, GPT, STYLES, random_batch

BASE = replace(GPT, position_embedding_type="none", add_bias_linear=False, activation_func="gelu")
SIDE_BY_SIDE: dict[str, Any] = {"parallel_residual": True, "parallel_residual_shared_norm": True}
MODELS = {
    "one norm": replace(BASE, **SIDE_BY_SIDE),
    "one norm, norms of outputs": replace(BASE, **SIDE_BY_SIDE, norm_placement="sandwich", residual_multiplier=0.7),
    "LayerNorm without bias": replace(BASE, norm_parameters="weight"),
    "LayerNorm without parameters": replace(BASE, norm_parameters="none", qk_layernorm=True),
    "RMSNorm without parameters": replace(BASE, norm_parameters="none", normalization="RMSNorm"),
    "norms of each head": replace(BASE, qk_layernorm=True, qk_layernorm_scope="each", apply_layernorm_1p=True),
    "RMSNorm of each head": replace(BASE, qk_layernorm=True, qk_layernorm_scope="each", normalization="RMSNorm"),
    "biases of outputs of attention": replace(BASE, add_attention_output_bias=True),
    "biases of MLPs": replace(BASE, add_mlp_bias=True),
    "bias of logits": replace(
        BASE, add_output_layer_bias=True, logits_scaling=3.0, untie_embeddings_and_output_weights=True
    ),
    "bias of logits, tied": replace(BASE, add_output_layer_bias=True),
    "clipped": replace(BASE, clip_qkv=0.3, add_qkv_bias=True),
}


def norm(config: TransformerConfig, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_epsilon)
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    x = x if weight is None else x * (weight + int(config.apply_layernorm_1p))
    return x if bias is None else x + bias


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    y = x @ weight.flatten(0, -2).t()
    return y if bias is None else y + bias.flatten()


def attention(config: TransformerConfig, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x [b, s, h]"""
    q, k, v = linear(weights, f"{name}.linear_qkv", x).unflatten(-1, (config.query_groups, 3, -1)).unbind(-2)
    if config.qk_layernorm:
        q, k = (norm(config, weights, f"{name}.{which}_layernorm", y) for which, y in (("q", q), ("k", k)))
    if (c := config.clip_qkv) is not None:
        q, k, v = (torch.where(y > c, c, torch.where(y < -c, -c, y)) for y in (q, k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / sqrt(config.head_dim)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return linear(weights, f"{name}.linear_proj", torch.einsum("bnqk,bknd->bqnd", shares, v).flatten(2))


def literal_logits(config: TransformerConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [b, s, V] of GPT with these parts."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    for number in range(config.num_layers):
        name = f"decoder.layers.{number}"

        def normed(of: str, x: Tensor, present: bool = True, name: str = name) -> Tensor:
            return norm(config, weights, f"{name}.{of}", x) if present else x

        def mlp(x: Tensor, name: str = name) -> Tensor:
            return linear(weights, f"{name}.mlp.linear_fc2", F.gelu(linear(weights, f"{name}.mlp.linear_fc1", x)))

        behind, before = config.norm_placement == "sandwich", normed("input_layernorm", x)
        attended = attention(config, weights, f"{name}.self_attention", before)
        attended = normed("post_attention_layernorm", attended, behind)
        after = x + config.residual_multiplier * attended
        of_mlp = before if config.parallel_residual else normed("pre_mlp_layernorm", after)
        x = after + config.residual_multiplier * normed("post_mlp_layernorm", mlp(of_mlp), behind)
    x = norm(config, weights, "decoder.final_layernorm", x)
    head = "embedding.word_embeddings" if config.tied_embeddings else "output_layer"
    logits = x @ weights[f"{head}.weight"].t()
    return (logits + weights.get("output_layer.bias", 0.0)) / config.logits_scaling


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_formulas(name: str) -> None:
    config = MODELS[name]
    model, batch = GPTModel(config, FP64), random_batch(config)
    parameters = {name: parameter for name, (parameter, _) in model.named_metas().items()}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    logits = literal_logits(config, weights, batch.tokens)[..., : config.vocab_size]
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    loss = (losses * batch.loss_mask.flatten()).sum()
    loss.backward()
    found = model(None, batch)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.logits(None, Batch.of_tokens(batch.tokens)), logits, rtol=1e-11, atol=1e-11)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-11, msg=name)


def test_one_norm_is_computed_again_and_changes_no_gradient() -> None:
    config = STYLES["command-r"]
    again = replace(config, recompute_granularity="selective", recompute_modules=("layernorm",))
    found = []
    for each in (config, again):
        model = GPTModel(each, FP64)
        model(None, random_batch(each)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
