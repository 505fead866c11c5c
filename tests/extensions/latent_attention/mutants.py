"""Mutants of multi-latent attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.extensions.latent_attention import multi_latent_attention
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants


def _unchanged(x: Tensor, axis: Axis) -> Tensor:
    """In place of a pair of collectives: neither of them happens."""
    return x


def _latents_without_norms(self: Any, x: Tensor) -> multi_latent_attention.Latents:
    kv, key = self.linear_kv_down(x).split((self.kv_rank, self.rotary_width), dim=-1)
    return multi_latent_attention.Latents(self.linear_q_down(x), kv, self.to_heads(key, self.tp).unsqueeze(2))


def _whole_factor_in_rotary_keys(self: Any, eta: Tensor, alpha: float) -> dict[Any, Tensor]:
    factors = _true_clip_factors(self, eta, alpha)
    factors[self.linear_q][:, self.key_width :] = eta[:, None] ** alpha
    return factors


_true_clip_factors = multi_latent_attention.MultiLatentAttention.clip_factors

CLIPPED = Combination.of(world="4", cp="2ulysses", update="clipped", heads="mla")

MUTANTS: Mutants = {
    "rotary keys' gradient not summed over tp": (
        [(multi_latent_attention, "copy_to", _unchanged)],
        Combination.of(world="2", tp="2", heads="mla", style="llama"),
    ),
    "norms of latents skipped": (
        [(multi_latent_attention.MultiLatentAttention, "_latents", _latents_without_norms)],
        Combination.of(world="2", heads="mla", style="llama"),
    ),
    "rotary queries are clipped like those without position": (
        [(multi_latent_attention.MultiLatentAttention, "clip_factors", _whole_factor_in_rotary_keys)],
        CLIPPED,
    ),
}
