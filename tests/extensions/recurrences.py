"""What tests of linear attentions share: packed documents, and a scalar of all results."""

from __future__ import annotations

import torch
from torch import Tensor


def documents(length: int) -> Tensor:
    """[s, 2]: documents of all kinds, one that begins with the sample, one of one token, some over several chunks."""
    starts = torch.zeros(length, 2, dtype=torch.int64)
    for sample, places in enumerate(((0, 3, 4, 15, 16, 17, 40), (5, 31, 32))):
        starts[[place for place in places if place < length], sample] = 1
    return starts.cumsum(0)


def weighted(results: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results]).sum()
