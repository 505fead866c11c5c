"""Attention logits: a recorder of the largest logit of each head, and a description of the projection rows that
determine the logits."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention


class LargestLogits:
    """Recorder of the largest attention logit of each head, [heads/tp], over all training passes since the last
    `clear`.

    Creating an instance starts the recording of logits. From then on, plain torch computes the layer's attention
    instead of a fused kernel.
    """

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
    """Kinds of output rows of a linear layer that projects to attention heads."""

    QUERY = "query"
    KEY = "key"
    QUERY_OF_SHARED_KEY = "query of a shared key"
    """Query channels whose key is shared by all heads. Because the key is shared, only the query can change the logits
    of a single head."""

    OTHER = "other"
    """Rows that compute values or gates, and therefore do not affect the attention logits."""


class HeadRows(NamedTuple):
    """Description of the rows of a linear layer that projects to heads. The weight of the layer has the shape
    [groups/tp, rows, ...]."""

    linear: nn.Module
    heads: int
    """Number of query heads per query group."""

    rows: tuple[tuple[RowKind, int], ...]
    """Blocks of consecutive rows within a query group, in order. Each block is a pair (kind, number of rows)."""


class AttentionWithRows(Protocol):
    """Attention layer that states which rows of its projections produce queries and keys."""

    core: CoreAttention

    def logit_rows(self) -> tuple[HeadRows, ...]: ...
