"""Causal attention over whole samples, or documents packed in them, in one launch of a kernel that takes sequences of
any lengths, one after the other.

Who sees whom is then in the lengths alone, so nothing is put together afterwards. Tiles, on CPU, of queries that are
cut over ranks and with dropout, give the same result (`ring.local_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.partition import Documents
from megatron.core.host_copies import integers_on


@dataclass(frozen=True)
class Sequences:
    """Where sequences begin in rows that hold them one after the other."""

    starts: Tensor
    """[n + 1] int32 on the device; the last is the number of rows."""

    longest: int

    window: int | None
    """Rows that a query sees, its own included; None for all up to its own."""


class PackedKernel(Protocol):
    """Attention within each of the sequences of q [rows, heads, d], k and v [rows, groups, d]; each row sees rows up to
    its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        """The output [rows, heads, d], and what else the backward needs."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...], sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `kept` is all that the forward returned."""


class FlashCUDAPackedKernel:
    """torch's flash attention for GPUs in 16 bits."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        starts, longest = sequences.starts, sequences.longest
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, sequences.window is None, False, **self._options(sequences)
        )
        return out, lse, rng_state, unused

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...], sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, rng_state, unused = kept
        starts, longest = sequences.starts, sequences.longest
        return torch.ops.aten._flash_attention_backward(
            grad,
            *(q, k, v, out, lse),
            *(starts, starts, longest, longest),
            0.0,
            sequences.window is None,
            rng_state,
            unused,
            **self._options(sequences),
        )

    def _options(self, sequences: Sequences) -> dict[str, Any]:
        left = -1 if sequences.window is None else sequences.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, window: int | None, kernel: PackedKernel
) -> Tensor:
    """q [s, b, heads, d], k and v [s, b, groups, d] of whole samples -> [s, b, heads, d]"""
    length, samples = q.shape[:2]
    sequences = _sequences(documents or ((0,),) * samples, length, window, q.device)
    # One sample after the other: for a single one the rows lie like this already.
    rows = _PackedAttention.apply(*(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)), sequences, kernel)
    return rows.unflatten(0, (samples, length)).transpose(0, 1)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, kernel: PackedKernel) -> Tensor:
        kept = kernel.forward(q, k, v, sequences)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.sequences, ctx.kernel = sequences, kernel
        return kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        return *ctx.kernel.backward(grad.contiguous(), q, k, v, tuple(kept), ctx.sequences), None, None


@lru_cache(maxsize=64)
def _sequences(documents: Documents, length: int, window: int | None, device: torch.device) -> Sequences:
    """All layers and passes of a micro-batch ask for the same ones: they are copied to the device once."""
    starts = sequence_starts(documents, length)
    longest = max(stop - start for start, stop in pairwise(starts))
    return Sequences(integers_on(device, starts, torch.int32), longest, window)


def sequence_starts(documents: Documents, length: int) -> tuple[int, ...]:
    """Rows at which the documents of all samples begin, samples of `length` rows one after the other, and the end."""
    starts = (sample * length + place for sample, places in enumerate(documents) for place in places)
    return *starts, len(documents) * length
