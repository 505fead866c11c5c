"""DeepSpeed Ulysses (arXiv:2309.14509): attention over the whole sequence, on every rank for some of the heads.

An all-to-all turns parts of the sequence with all local heads into the whole sequence with a part of the heads, and
another one turns the output back. Their bytes shrink with the number of ranks; there cannot be more ranks than groups
of keys, and both heads and groups must divide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.all_gather import from_rank_order, to_rank_order
from megatron.core.attention.ring import Causal, local_attention
from megatron.core.collectives import swap_blocks
from megatron.core.parallel_state import Axis


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, cp: Axis, causal: Causal) -> Tensor:
    """q [s/cp, b, heads, d], k and v [s/cp, b, groups, d], as `rank_spans` cuts s -> [s/cp, b, heads, d]

    Rank r computes the r-th part of the heads.
    """
    parts = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]  # [s/cp, b, cp, heads/cp, d]
    widths = [part.shape[3] for part in parts]
    qkv = swap_blocks(torch.cat(parts, dim=3).movedim(2, 0), cp)  # [cp, s/cp, b, widths, d], first the rank of origin
    qkv = from_rank_order(qkv.flatten(0, 1), cp.size)
    q, k, v = qkv.split(widths, dim=2)
    out = local_attention(q, k, v, causal)
    out = to_rank_order(out, cp.size).unflatten(0, (cp.size, -1))
    return swap_blocks(out, cp).movedim(0, 2).flatten(2, 3)
