"""Tests of multi-latent attention: planned FLOPs, activations and collectives, and the compiled region."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.attention.latent_attention.multi_latent_attention import rotated_heads
from megatron.extensions.plan.planner.flops import model_flops
from megatron.training.config.flags import with_fields
from tests.dist.test_collective_counts import B, H, S, per_layer
from tests.extensions.planner.test_planned_activations import SAMPLES, kept_in_bf16
from tests.gpt_cases import LATENT
from tests.pure.test_model_math import STYLES, shape
from tests.pure.test_regions import ANGLES, check_region, compiles


def test_flops_of_latent_attention() -> None:
    """For each query, a head multiplies the keys (10 channels) and the values (5 channels) of half of the tokens. Each
    channel costs 2 FLOPs per pass, and the backward pass counts as two passes."""
    config = with_fields(TransformerConfig(**shape(2, 32, 4, 64, 128, 16)), STYLES["latent"])
    assert model_flops(config).attention == 2 * 3 * 2 * 4 * (10 + 5) * 8
    for more in ({}, {"window_size": 100}):  # sequences of 600 tokens have several diagonal tiles
        long = replace(config, seq_length=600, **more)
        assert model_flops(long).attention == pytest.approx(2 * 3 * 2 * 4 * (10 + 5) * long.layers[0].span.mean(600))


def test_recomputation_of_heads_saves_only_latents() -> None:
    """Queries, keys and values are not saved. Only the projection output that consists of the key-value latent and the
    rotary key is saved."""
    widths = LATENT.options(LatentAttentionFlags)
    model, tokens = LATENT, SAMPLES * LATENT.seq_length
    kept = []
    for modules in (("mlp",), ("mlp", "mla_up_proj")):
        kept.append(kept_in_bf16(model, recompute_granularity="selective", recompute_modules=modules))
    of_heads = model.num_attention_heads * (2 * model.head_dim + model.value_head_dim)
    projected = widths.kv_lora_rank + widths.qk_pos_emb_head_dim
    # There are two layers, and a bf16 value has 2 bytes.
    assert kept[0] - kept[1] == 2 * tokens * 2 * (of_heads - projected)


def test_latents_are_gathered_in_place_of_hidden_states() -> None:
    """With sequence parallelism, attention gathers the query latent, the key-value latent and the rotary key, which
    together have 26 channels in this model."""
    forward, backward = per_layer(4, True, "latent", "fp32")
    widths = (12, 10, 4, H)
    gathers, sum_ = [("all_gather", S * B * width * 4) for width in widths], ("all_to_all", S * B * H * 4)
    assert Counter(forward) == Counter([*gathers, sum_, sum_])
    scatters = [("all_to_all", nbytes) for _, nbytes in gathers]
    regathered = [call for call, width in zip(gathers, widths, strict=True) if width != 4]
    # One all-gather is for the output gradients of proj, and the other for those of fc2.
    entering = ("all_gather", S * B * H * 4)
    assert Counter(backward) == Counter([*scatters, *regathered, entering, entering])


def test_latent_gradients_are_reduced_under_tensor_parallelism() -> None:
    """Without sequence parallelism, attention reduces the gradients of its latents over the ranks, not the gradients of
    its hidden states."""
    forward, backward = per_layer(4, False, "latent", "fp32")
    assert forward == [("all_reduce", S * B * H * 4)] * 2
    assert Counter(backward) == Counter(("all_reduce", S * B * width * 4) for width in (12, 10, 4, H))


def latent_heads(x: Tensor, compiled: bool) -> Tensor:
    heads, tables = x.unflatten(-1, (-1, 10)), (ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype))
    key = heads[:, :, :1, : 2 * ANGLES.shape[-1]]
    parts = region(rotated_heads, compiled)(heads[:, :, :2], heads[:, :, 2:4], key, *tables)
    return torch.cat([part.flatten(2) for part in parts], -1)


@compiles
def test_the_compiled_region_matches_the_plain_one() -> None:
    check_region(latent_heads)
