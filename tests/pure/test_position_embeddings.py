"""Position embeddings against their definitions and against those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.attention.core_attention import alibi_slopes
from megatron.core.transformer.rotary import RotaryEmbedding
from tests.gpt_cases import LLAMA

CPU = torch.device("cpu")
ROPE = replace(LLAMA, hidden_size=64, kv_channels=8)


@pytest.mark.parametrize("scaled", [False, True])
def test_interpolated_positions_are_divided(scaled: bool) -> None:
    """Position 4i under a factor of 4 is position i, also where Llama 3.1 scales frequencies."""
    config = replace(ROPE, use_rope_scaling=scaled, rope_scaling_original_max_position_embeddings=16)
    at = torch.arange(6)
    longer = replace(config, rotary_seq_len_interpolation_factor=4)
    plain = RotaryEmbedding(config, CPU, torch.float64, config.rotation)(at)
    stretched = RotaryEmbedding(longer, CPU, torch.float64, config.rotation)(4 * at)
    for one, other in zip(plain, stretched, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 14, 16, 71, 112])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs, rtol=2e-6, atol=0)
