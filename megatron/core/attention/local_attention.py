"""Causal attention within one rank: packed documents, sliding windows and dropout."""

from __future__ import annotations

from torch import Tensor

from megatron.core.attention.partition import Spans
from megatron.core.attention.ring import Ring, RingAttention
from megatron.core.attention.tile_kernels import Causal
from megatron.core.attention.tiles import causal_tiles
from megatron.core.attention.varlen import packed_attention
from megatron.core.parallel_state import Axis


def local_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, queries: Spans | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [n, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv], sinks [heads] -> [n, b, heads, dv]

    The keys are at positions 0 to s - 1, the queries at the positions `queries`, by default the same. One
    variable-length launch where the kernel has one and the queries are whole samples; one launch of a kernel that takes
    all tiles `at_once`; else tiles, as a ring of one.
    """
    whole = (range(k.shape[0]),)
    if (at_once := getattr(causal.kernel, "at_once", None)) is not None:
        out: Tensor = at_once(q, k, v, causal_tiles(queries or whole, whole, causal.documents, causal.window), sinks)
        return out
    if queries is None and causal.kernel.packed is not None:
        return packed_attention(q, k, v, causal.documents, causal.window, causal.kernel.packed, sinks)
    return RingAttention.apply(q, k, v, sinks, Ring(Axis(), queries or whole, (whole,), causal))
