"""The logits of core attention: the largest of each head, and the rows of projections that they depend on."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention


class LargestLogits:
    """The largest logit of each head [heads/tp] that passes in training have computed since the last `clear`. It begins
    with being built; plain torch computes this attention from then on."""

    def __init__(self, core: CoreAttention) -> None:
        dtype = torch.promote_types(core.dtype, torch.float32)
        self.values = torch.full((core.local_heads,), float("-inf"), dtype=dtype, device=core.device)
        self._computed_here = self.values[core.sink_heads]
        core.watch_logits(self._note)

    def _note(self, largest: Tensor) -> None:
        torch.maximum(self._computed_here, largest, out=self._computed_here)

    def clear(self) -> None:
        self.values.fill_(float("-inf"))


class RowKind(Enum):
    """Kinds of rows of a projection to heads."""

    QUERY = "query"
    KEY = "key"
    QUERY_OF_SHARED_KEY = "query of a shared key"
    """Channels of queries whose key belongs to all heads, so that only the query can change the logits of one head."""

    OTHER = "other"
    """Values and gates, on which logits do not depend."""


class HeadRows(NamedTuple):
    """The rows of a projection to heads, in order: it is [groups/tp, rows, ...]."""

    linear: nn.Module
    heads: int
    """Query heads of a group."""

    rows: tuple[tuple[RowKind, int], ...]
    """Kind and number of the rows, in order."""


class AttentionWithRows(Protocol):
    """An attention layer that says which rows of its projections make queries and keys."""

    core: CoreAttention

    def logit_rows(self) -> tuple[HeadRows, ...]: ...
