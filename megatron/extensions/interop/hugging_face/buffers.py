"""Buffers that Hugging Face files contain in addition to weights. Their values are computed from the model's
configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import whole
from megatron.extensions.interop.hugging_face.read_config import fields_of
from megatron.extensions.interop.hugging_face.safetensors_file import TensorSpec

Buffer = tuple[TensorSpec, Callable[[], Tensor]]
"""Shape and dtype of a buffer, and the function that computes its values."""


def buffers_of(config: TransformerConfig, model_type: str, dtype: torch.dtype) -> Iterator[tuple[str, Buffer]]:
    """Yield the name and the `Buffer` of each buffer that files of the family `model_type` contain."""
    if model_type == "minimax":
        yield from _lightning_decays(config, dtype)
    if model_type == "longcat_flash":
        yield from _experts_without_computation(config, dtype)


def _lightning_decays(config: TransformerConfig, dtype: torch.dtype) -> Iterator[tuple[str, Buffer]]:
    block, heads = whole(fields_of(config), "lightning_chunk_size"), config.num_attention_heads
    shapes = {
        "slope_rate": (heads, 1, 1),
        "query_decay": (heads, block, 1),
        "key_decay": (heads, block, 1),
        "diagonal_decay": (1, heads, block, block),
    }
    for layer in (number for number, linear in enumerate(config.linear_pattern) if linear):
        for name, shape in shapes.items():

            def compute(layer: int = layer, name: str = name) -> Tensor:
                return lightning_decay(name, config, layer, block).to(dtype)

            yield f"model.layers.{layer}.self_attn.{name}", (TensorSpec(shape, dtype), compute)


def _experts_without_computation(config: TransformerConfig, dtype: torch.dtype) -> Iterator[tuple[str, Buffer]]:
    """Yield the name and the `Buffer` of each gate and up weight of LongCat-Flash's zero-computation experts.

    The weights are zeros. The transformers class does not use these weights, but refuses files that lack them.
    """
    first, zero_experts = config.num_experts or 0, fields_of(config)["moe_zero_experts"]
    count = zero_experts if isinstance(zero_experts, int) else 0
    spec = TensorSpec((config.moe_ffn_size, config.hidden_size), dtype)
    for layer in range(config.num_layers // 2):
        for expert in range(first, first + count):
            for name in ("gate_proj", "up_proj"):
                zeros = partial(torch.zeros, spec.shape, dtype=dtype)
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", (spec, zeros)


def lightning_decay(name: str, config: TransformerConfig, layer: int, block: int) -> Tensor:
    """Return a buffer of MiniMax's lightning attention, in fp32. The buffer `slope_rate` contains the decay rate of
    each head; the other buffers contain decay factors within a block of tokens."""
    heads, last = config.num_attention_heads, config.num_layers - 1
    base = 1 / (2 ** (8 / heads))
    rate = (base ** (torch.arange(heads) + 1) * (1 - layer / (last + 1e-5) + 1e-5))[:, None, None]
    token = torch.arange(block) + 1
    if name == "slope_rate":
        return rate
    if name == "query_decay":
        return torch.exp(-rate * token[:, None])
    if name == "key_decay":
        return torch.exp(-rate * (block - token[:, None]))
    distance = rate * (token[:, None] - token[None, :])[None, None]
    return torch.exp(torch.where(distance >= 0, -distance, float("-inf")))
