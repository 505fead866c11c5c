"""The gated delta rule by the Triton kernels of the package flash-linear-attention, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from megatron.core.attention.partition import Documents
from megatron.core.attention.varlen import cumulative_lengths

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Documents | None], Tensor]
"""(q, k, v, g, beta, documents) -> out [s, b, heads, dv], the shapes as in `gated_delta_rule`."""


def flash_rule(dtype: torch.dtype, device: torch.device) -> Rule | None:
    """The rule by the package's kernels; None where these cannot run: they need a GPU and 16 bits, and may differ from
    run to run."""
    if device.type != "cuda" or dtype.itemsize != 2 or torch.are_deterministic_algorithms_enabled():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents | None) -> Tensor:
        length, samples, heads, _ = v.shape
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
        q, k, v, g, beta = (x.transpose(0, 1).contiguous() for x in (q, k, v, g, beta))
        if documents is None:
            return chunk_gated_delta_rule(q, k, v, g, beta)[0].transpose(0, 1)
        lengths = tuple(stop - start for starts in documents for start, stop in pairwise((*starts, length)))
        q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
        out, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cumulative_lengths(lengths, q.device).long())
        return out.squeeze(0).unflatten(0, (samples, length)).transpose(0, 1)

    return rule
