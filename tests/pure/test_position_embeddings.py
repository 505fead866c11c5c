"""Position embeddings against their definitions and against those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.attention.core_attention import alibi_slopes
from megatron.core.transformer.rotary import RotaryEmbedding, apply_rotary, apply_rotary_interleaved
from tests.gpt_cases import LLAMA

CPU = torch.device("cpu")
ROPE = replace(LLAMA, hidden_size=64, kv_channels=8)


def random_heads(length: int = 12, channels: int = 8) -> torch.Tensor:
    """[s, b, heads, channels]"""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(length, 2, 3, channels, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("percent", [0.5, 1.0])
def test_interleaved_rotation_is_that_of_gptj(percent: float) -> None:
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x, channels = random_heads(), int(8 * percent)
    config = replace(ROPE, rotary_percent=percent)
    cos, sin = RotaryEmbedding(config, CPU, torch.float64, config.rotation)(torch.arange(12))
    found = apply_rotary_interleaved(x, cos, sin)
    tables = torch.cat((sin, cos), dim=-1).squeeze(2).transpose(0, 1)  # [1, s, channels], as GPT-J has them
    torch.testing.assert_close(tables[0].float(), gptj.create_sinusoidal_positions(12, channels), rtol=1e-6, atol=1e-6)
    theirs = gptj.apply_rotary_pos_emb(x[..., :channels].transpose(0, 1), *tables.chunk(2, dim=-1)).transpose(0, 1)
    torch.testing.assert_close(found[..., :channels], theirs, rtol=1e-14, atol=1e-14)
    assert torch.equal(found[..., channels:], x[..., channels:])


def test_interleaved_rotation_is_the_other_one_of_channels_in_another_order() -> None:
    x = random_heads()
    tables = RotaryEmbedding(ROPE, CPU, torch.float64, ROPE.rotation)(torch.arange(12))
    halves = [0, 2, 4, 6, 1, 3, 5, 7]
    assert torch.equal(apply_rotary_interleaved(x, *tables)[..., halves], apply_rotary(x[..., halves], *tables))


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


def test_slopes_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-number for number in range(1, 9)]
    assert alibi_slopes(16)[::2] == [2.0 ** -(number + 0.5) for number in range(8)]
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
