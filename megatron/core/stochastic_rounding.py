"""Stochastic rounding: random bits as hashes of numbers at hand, so that no generator has a state. Plain torch, which a
compiler makes part of the kernel around it."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bf16(x: Tensor, uniform: Tensor) -> Tensor:
    """Rounds fp32 to bf16 with an exact expected value."""
    bits = x.view(torch.int32) + (uniform * 65536.0).to(torch.int32)
    return ((bits >> 16) << 16).view(torch.float32).to(torch.bfloat16)


def mixed(bits: Tensor) -> Tensor:
    """A hash of int32 numbers: each bit of the input changes each bit of the result in half of all cases."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261
    return bits ^ ((bits >> 16) & 0xFFFF)


def uniform_of(key: Tensor, salt: int) -> Tensor:
    """Numbers in [0, 1) from keys of 32 bits; other salts give other numbers."""
    bits = mixed(key ^ salt)
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24
