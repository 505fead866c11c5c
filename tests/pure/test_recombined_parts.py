"""Parts of decoders that families combine, against formulas written down from their papers and published models."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt
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
ROTATED: dict[str, Any] = {"position_embedding_type": "rope", "qk_layernorm": True}
TEMPERED: dict[str, Any] = {"attention_temperature_coeff": 0.5, "attention_temperature_floor": 3}
SIDE_BY_SIDE: dict[str, Any] = {"parallel_residual": True, "parallel_residual_shared_norm": True}
MODELS = {
    "one norm": replace(BASE, **SIDE_BY_SIDE),
    "one norm, norms of outputs": replace(BASE, **SIDE_BY_SIDE, norm_placement="sandwich", residual_multiplier=0.7),
    "norms of sums": replace(BASE, norm_placement="sum", residual_multiplier=0.7),
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
    "positions from the third row on": replace(BASE, position_embedding_type="learned_absolute", position_offset=2),
    "sinusoids": replace(BASE, position_embedding_type="sinusoidal", position_offset=2, embedding_multiplier=3.0),
    "norms behind rotations": replace(BASE, **ROTATED, qk_layernorm_after_rotary=True, clip_qkv=0.9),
    "sharper with distance": replace(BASE, **ROTATED, **TEMPERED, attention_temperature_everywhere=True),
    "gates of softplus": replace(BASE, attention_output_gate=True, attention_gate_function="softplus"),
    "ReLU": replace(BASE, activation_func="relu"),
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


def rotated(x: Tensor) -> Tensor:
    """x [b, s, heads, d] as complex numbers, times exp(i p / 10000^(2j / d)), with angles in fp32"""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]).float(), 1 / 10000.0 ** (torch.arange(half).float() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angles.cos(), angles.sin())[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def position_vectors(config: TransformerConfig, weights: dict[str, Tensor], length: int) -> Tensor | float:
    places, half = torch.arange(length) + config.position_offset, config.hidden_size // 2
    if config.position_embedding_type == "learned_absolute":
        return weights["embedding.position_embeddings.weight"][places]
    angles = torch.outer(places.float(), (torch.arange(half).float() * -(log(10000) / (half - 1))).exp())
    return torch.cat((angles.sin(), angles.cos()), 1) if config.position_embedding_type == "sinusoidal" else 0.0


def attention(config: TransformerConfig, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x [b, s, h]"""
    count = 4 if config.attention_output_gate else 3
    q, *gate, k, v = linear(weights, f"{name}.linear_qkv", x).unflatten(-1, (-1, count, config.head_dim)).unbind(-2)
    norms, last = (f"{name}.q_layernorm", f"{name}.k_layernorm"), config.qk_layernorm_after_rotary
    if config.qk_layernorm and not last:
        q, k = (norm(config, weights, each, y) for each, y in zip(norms, (q, k), strict=True))
    if (c := config.clip_qkv) is not None:
        q, k, v = (torch.where(y > c, c, torch.where(y < -c, -c, y)) for y in (q, k, v))
    if config.rotary:
        q, k = rotated(q), rotated(k)
    if last:
        q, k = (norm(config, weights, each, y) for each, y in zip(norms, (q, k), strict=True))
    if config.attention_temperature_everywhere:
        steps = (torch.arange(x.shape[1]) // config.attention_temperature_floor).float()
        q = q * (1 + config.attention_temperature_coeff * steps.log1p())[:, None, None]
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / sqrt(config.head_dim)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    out = torch.einsum("bnqk,bknd->bqnd", shares, v).flatten(2)
    out = out * (1 + gate[0].flatten(2).exp()).log() if gate else out
    return linear(weights, f"{name}.linear_proj", out)


def literal_logits(config: TransformerConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [b, s, V] of GPT with these parts."""
    x = weights["embedding.word_embeddings.weight"][tokens] * config.embedding_multiplier
    x = x + position_vectors(config, weights, tokens.shape[1])
    for number in range(config.num_layers):
        name = f"decoder.layers.{number}"

        def normed(of: str, x: Tensor, present: bool = True, name: str = name) -> Tensor:
            return norm(config, weights, f"{name}.{of}", x) if present else x

        def mlp(x: Tensor, name: str = name) -> Tensor:
            function = F.relu if config.activation == "relu" else F.gelu
            return linear(weights, f"{name}.mlp.linear_fc2", function(linear(weights, f"{name}.mlp.linear_fc1", x)))

        behind, sums = config.norm_placement == "sandwich", config.norm_placement == "sum"
        before = normed("input_layernorm", x, not sums)
        attended = attention(config, weights, f"{name}.self_attention", before)
        attended = normed("post_attention_layernorm", attended, behind)
        after = normed("post_attention_layernorm", x + config.residual_multiplier * attended, sums)
        of_mlp = before if config.parallel_residual else normed("pre_mlp_layernorm", after, not sums)
        x = after + config.residual_multiplier * normed("post_mlp_layernorm", mlp(of_mlp), behind)
        x = normed("post_mlp_layernorm", x, sums)
    x = x if config.norms_sums else norm(config, weights, "decoder.final_layernorm", x)
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
