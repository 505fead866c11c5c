"""Mutants of multi-latent attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.extensions.latent_attention import multi_latent_attention
from tests.parity.mutants.common import mutant

CLIPPED = {"world": "4", "cp": "2ulysses", "update": "clipped", "heads": "mla"}


@mutant(multi_latent_attention, "copy_to", world="2", tp="2", heads="mla", style="llama")
def _unchanged(x: Tensor, axis: Axis) -> Tensor:
    """Rotary keys' gradient not summed over tp.

    In place of a pair of collectives: neither of them happens."""
    return x


@mutant(multi_latent_attention.MultiLatentAttention, "_latents", world="2", heads="mla", style="llama")
def _latents_without_norms(self: Any, x: Tensor) -> multi_latent_attention.Latents:
    """Norms of latents skipped."""
    kv, key = self.linear_kv_down(x).split((self.kv_rank, self.rotary_width), dim=-1)
    return multi_latent_attention.Latents(self.linear_q_down(x), kv, self.to_heads(key, self.tp).unsqueeze(2))


@mutant(multi_latent_attention.MultiLatentAttention, "_scaled", world="2", heads="mla", style="llama")
def _latents_as_normed(self: Any, latent: Tensor, of: str) -> Tensor:
    """Latents are not multiplied by their scales."""
    return latent


@mutant(multi_latent_attention.MultiLatentAttention, "clip_factors", **CLIPPED)
def _whole_factor_in_rotary_keys(self: Any, eta: Tensor, alpha: float) -> dict[Any, Tensor]:
    """Rotary queries are clipped like those without position."""
    factors = _true_clip_factors(self, eta, alpha)
    factors[self.linear_q][:, self.key_width :] = eta[:, None] ** alpha
    return factors


_true_clip_factors = multi_latent_attention.MultiLatentAttention.clip_factors
