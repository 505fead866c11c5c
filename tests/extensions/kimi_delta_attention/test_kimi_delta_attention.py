"""Tests of Kimi Delta Attention. The chunked computation is compared with the recurrence. The tests in
tests/extensions/hugging_face compare logits, gradients and greedy text."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.extensions.mixers.kimi_delta_attention.kimi_delta_attention import sigmoid_gated_norm
from megatron.extensions.mixers.linear_attention.gated_delta_rule import gated_delta_chunks, gated_delta_steps
from tests.extensions.recurrences import check_chunks, check_strong_decay, delta_operands, mixer_flops
from tests.gpt_cases import model_of
from tests.pure.test_regions import check_region, compiles

KIMI = model_of("kimi-delta")


operands = partial(delta_operands, 3, (3, 5))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (9, 64), (48, 16), (53, 24), (70, 64)])
def test_chunks_match_the_recurrence(length: int, chunk: int, packed: bool) -> None:
    """The sequence lengths cover one chunk, several chunks, and a partial last chunk."""
    check_chunks(gated_delta_chunks, gated_delta_steps, operands(length), chunk, packed)


def test_strong_decay_does_not_overflow() -> None:
    """The decay is strong both over a whole chunk and inside a single block."""
    check_strong_decay(gated_delta_chunks, gated_delta_steps, operands(64, torch.float32, decay=40.0))


def test_flops() -> None:
    """In a sample of one block, the FLOPs per token are three times those of the forward pass. The forward pass
    consists of projections, low-rank projections, and the GEMMs of a chunk. Scores within the block are sums over
    channels rather than GEMMs."""
    hidden, heads, width, chunk = 32, 8, 5, 16
    projections = hidden * heads * (3 * width + 1) + 2 * width * (hidden + heads * width) + heads * width * hidden
    mixed = heads * (3 * chunk * width + 3 * width**2)
    found = mixer_flops(KIMI, "K", seq_length=16) - 6 * projections
    assert 6 * mixed <= found <= 7 * mixed + 2 * heads * (chunk * width + 2 * chunk**2)


def region_of_gates(x: Tensor, compiled: bool) -> Tensor:
    heads = x.unflatten(-1, (-1, 4))
    return region(sigmoid_gated_norm, compiled)(heads, heads * 2, torch.linspace(-1, 1, 4, dtype=x.dtype), 1e-5)


@compiles
def test_the_compiled_region_matches_the_plain_one() -> None:
    check_region(region_of_gates)
