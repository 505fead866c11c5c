"""Tests of lightning attention's decay rates and FLOPs. The tests in tests/extensions/hugging_face compare logits,
gradients and greedy text."""

from __future__ import annotations

import torch

from megatron.extensions.mixers.lightning_attention.lightning_attention import decay_rates
from tests.extensions.recurrences import mixer_flops
from tests.gpt_cases import model_of

LIGHTNING = model_of("lightning")


def test_rates() -> None:
    """Multi-token prediction layers use the decay rates of the last decoder layer."""
    last, further = (decay_rates(range(8), n, LIGHTNING, torch.float64, torch.device("cpu")) for n in (3, 4))
    assert 0 < last.min() <= last.max() < 1e-4 and torch.equal(last, further)


def test_flops() -> None:
    """The FLOPs per token are three times those of the forward pass. The forward pass consists of both projections, the
    scores and weighted sums within a chunk, and the writes and reads of the states."""
    hidden, heads, width, chunk = 32, 8, 4, 4
    mixed = heads * width * (2 * chunk + 2 * width)
    sums = 2 * heads * chunk  # the sums of decays have no backward pass
    assert mixer_flops(LIGHTNING, "L") == 6 * (mixed + 5 * hidden**2) + sums
