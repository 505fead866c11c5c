"""Tiny models of each style, and random batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.config.flags import with_fields
from tests.extensions import installed

FP64 = ModelParallelConfig(fp64=True)

GPT = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    seq_length=16,
    vocab_size=101,
    make_vocab_size_divisible_by=16,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)

LLAMA = replace(
    GPT,
    ffn_hidden_size=48,
    group_query_attention=True,
    num_query_groups=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)

LATENT = with_fields(
    replace(LLAMA, group_query_attention=False, num_query_groups=None, qk_layernorm=True, mscale_all_dim=0.7),
    {
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 8,
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
    },
)

DELTA_NET = with_fields(
    LLAMA,
    {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "2",
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
)

STYLES = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen2": replace(LLAMA, add_qkv_bias=True, untie_embeddings_and_output_weights=False),
    "qwen3": replace(LLAMA, qk_layernorm=True, kv_channels=8),
    "mistral": replace(LLAMA, window_size=5),
    "gpt-qk-norm": replace(GPT, qk_layernorm=True, squared_relu=True),
    "no-positions": replace(GPT, position_embedding_type="none"),
    "partial-rotary": replace(GPT, position_embedding_type="rope", rotary_percent=0.5),
    "gemma": replace(
        LLAMA, swiglu=False, activation_func="geglu_tanh", apply_layernorm_1p=True, scale_word_embeddings=True
    ),
    "apertus": replace(LLAMA, swiglu=False, activation_func="xielu", qk_layernorm=True),
    "layernorm-1p": replace(GPT, apply_layernorm_1p=True, qk_layernorm=True),
    "bloom": replace(GPT, position_embedding_type="alibi", embed_layernorm=True),
    "alibi-gqa": replace(LLAMA, position_embedding_type="alibi", window_size=9),
    "sinks": replace(LLAMA, softmax_type="learnable", window_size=5, window_attn_skip_freq="2"),
    "off-by-one": replace(GPT, softmax_type="off-by-one"),
    "windows-in-some": replace(
        LLAMA, window_size=5, window_attn_skip_freq="2", window_rotary_base=500.0, use_rope_scaling=True
    ),
    "chunks-in-some": replace(LLAMA, attention_chunk_size=6, window_attn_skip_freq="2", no_rope_freq="2"),
    "gpt-oss": replace(
        LLAMA,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=0.05,
        add_bias_linear=True,
        softmax_type="learnable",
        window_size=5,
        window_attn_skip_freq="2",
    ),
    "llama4": replace(
        LLAMA,
        attention_chunk_size=6,
        window_attn_skip_freq="2",
        no_rope_freq="2",
        rotary_interleaved=True,
        qk_l2_norm=True,
        attention_temperature_coeff=0.5,
        attention_temperature_floor=3,
    ),
    "olmo2": replace(LLAMA, norm_placement="output", qk_layernorm=True, qk_layernorm_scope="all"),
    "sandwich": replace(
        GPT, norm_placement="sandwich", attention_output_gate=True, final_logit_softcapping=2.0, softmax_scale=0.4
    ),
    "capped": replace(GPT, attn_logit_softcapping=0.5, window_size=5, window_attn_skip_freq="2"),
    "head-wise-gate": replace(LLAMA, head_wise_attn_gate=True, qk_layernorm=True, add_qkv_bias=True),
    "own-heads": replace(
        LLAMA,
        kv_channels=8,
        value_channels=6,
        attention_value_scale=0.7,
        head_wise_attn_gate=True,
        window_size=5,
        window_attn_skip_freq="2",
        window_num_attention_heads=16,
        window_num_query_groups=8,
        window_softmax_type="learnable",
        window_rotary_base=500.0,
        window_rotary_percent=0.5,
    ),
    "own-widths": replace(GPT, ffn_hidden_size_pattern="([40]+[24])"),
    "pythia": replace(GPT, parallel_residual=True, position_embedding_type="rope", rotary_percent=0.5),
    "granite": replace(
        LLAMA, embedding_multiplier=3.0, residual_multiplier=0.3, logits_scaling=4.0, attention_output_gate=True
    ),
    "yarn": replace(
        LLAMA, rope_type="yarn", rotary_scaling_factor=8.0, original_max_position_embeddings=16, rotary_percent=0.5
    ),
    "interleaved-rotary": replace(
        GPT, position_embedding_type="rope", rotary_interleaved=True, rotary_seq_len_interpolation_factor=2.5
    ),
    "multi-token": replace(LLAMA, mtp_num_layers=2),
    "multi-token-tied": replace(GPT, mtp_num_layers=1, embed_layernorm=True),
}
if installed("latent_attention"):
    STYLES |= {
        "latent": LATENT,
        "latent-whole-queries": with_fields(
            LATENT,
            {
                "q_lora_rank": None,
                "qk_layernorm": False,
                "v_head_dim": 16,
                "rope_type": "rope",
                "add_bias_linear": True,
                "window_size": 7,
            },
        ),
        "own-heads-mla": replace(
            LATENT,
            window_size=5,
            window_attn_skip_freq="2",
            window_num_attention_heads=4,
            window_softmax_type="off-by-one",
        ),
    }
if installed("linear_attention"):
    STYLES["delta-net"] = DELTA_NET
    STYLES["delta-net-everywhere"] = with_fields(
        replace(GPT, apply_layernorm_1p=True),
        {
            "experimental_attention_variant": "gated_delta_net",
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 7,
        },
    )


def with_dropout(config: TransformerConfig, attention: float = 0.15, hidden: float = 0.2) -> TransformerConfig:
    return replace(config, attention_dropout=attention, hidden_dropout=hidden)


def random_batch(config: TransformerConfig, samples: int = 3, seed: int = 0, **more: Any) -> Batch:
    """Random tokens, a random loss mask, sample numbers that do not start at 0."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.vocab_size, (samples, config.seq_length + 1), generator=generator)
    loss_mask = (torch.rand(samples, config.seq_length, generator=generator) < 0.8).float()
    batch = Batch(text[:, :-1], text[:, 1:], loss_mask, torch.arange(samples) + 7, **more)
    return batch.with_future(config.mtp_depths)


def token_losses(model: GPTModel, batch: Batch) -> torch.Tensor:
    """Loss of each token [b, s], by the last stage."""
    assert model.loss is not None and model.output_layer is not None
    return model.loss(model.output_layer(model.hidden_states(None, batch)), batch.labels.t()).t()


def logits_in_parts(model: GPTModel, tokens: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """Logits of texts tokens [b, s] that are read in parts, each behind a cache of the parts before, and the cache.
    Skips the test where generation is deleted."""
    kv_cache = pytest.importorskip("megatron.extensions.inference.generation.kv_cache", reason="inference is deleted")
    cache = kv_cache.KeyValueCache()
    parts = [
        model.logits(None, Batch.of_tokens(part), cache.extend([part.shape[1]] * len(part), part.device))
        for part in tokens.split(list(lengths), dim=1)
    ]
    return torch.cat(parts, 1), cache


def packed_documents(config: TransformerConfig, samples: int = 3) -> dict[str, torch.Tensor]:
    """Position and document ids of samples that hold three documents each, cut at other places in each sample."""
    document_ids = torch.zeros(samples, config.seq_length, dtype=torch.int64)
    position_ids = torch.zeros_like(document_ids)
    for sample in range(samples):
        cuts = [0, 3 + sample, 9 + sample, config.seq_length]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            document_ids[sample, start:stop] = number
            position_ids[sample, start:stop] = torch.arange(stop - start)
    return {"position_ids": position_ids, "document_ids": document_ids}
