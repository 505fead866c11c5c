"""What a micro-batch is, and what of it every layer needs.

Both are passed explicitly from the model down to the attention core: no layer keeps state of the batch, so a
stage may have many micro-batches in flight and recompute any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.dot_product import KeyValueCache


@dataclass(frozen=True)
class Batch:
    """One micro-batch: b samples of s tokens."""

    tokens: Tensor
    """[b, s] int64."""

    labels: Tensor
    """[b, s] int64: the token that follows each."""

    loss_mask: Tensor
    """[b, s] float: 1 where the loss counts, 0 where it does not."""

    sample_index: Tensor
    """[b] int64: absolute number of each sample in the run; dropout masks follow from it, whatever the layout."""

    position_ids: Tensor | None = None
    """[b, s] int64; None for 0 .. s-1."""

    document_ids: Tensor | None = None
    """[b, s] int64: tokens attend within equal ids only; None for one document a sample."""

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> Batch:
        """A batch without labels of its own: each token predicts the next, the last predicts nothing."""
        labels = torch.roll(tokens, -1, dims=1)
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
        loss_mask[:, -1] = 0
        return cls(tokens, labels, loss_mask, torch.arange(tokens.shape[0], device=tokens.device))

    @property
    def num_tokens(self) -> Tensor:
        """Scalar: tokens whose loss counts. Stays on the device."""
        return self.loss_mask.sum()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in values if value is not None}
        return replace(self, **moved)


@dataclass(frozen=True)
class BatchContext:
    """What layers need to know of a micro-batch beyond its hidden states. A stage derives it once per forward pass."""

    sample_index: Tensor
    """[b] int64."""

    position_ids: Tensor | None = None
    """[b, s]; None for 0 .. s-1 (from the cache's length on, with a cache)."""

    document_ids: Tensor | None = None
    """[b, s]; None for one document a sample."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [s, 1 or b, 1, rotary_dim / 2]; None without rotary positions."""

    mask: Tensor | None = None
    """[1 or b, 1, s, keys] bool, true where a query sees a key; None for plain causal attention."""

    cache: KeyValueCache | None = None
    """Keys and values of earlier tokens, for generation."""

    @classmethod
    def of(cls, batch: Batch, cache: KeyValueCache | None = None) -> BatchContext:
        """The context of a batch, before a stage has derived `rotary` and `mask`."""
        return cls(batch.sample_index, batch.position_ids, batch.document_ids, cache=cache)
