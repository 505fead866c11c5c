"""A micro-batch, and the context of it that every layer receives.

Both are arguments all the way down to core attention. No layer keeps state of a batch, so a pipeline stage can have
many micro-batches in flight and recompute any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.attention.partition import Documents, document_starts, rank_spans
from megatron.core.config.layers import Rotation, Span
from megatron.core.host_to_device import copied_to
from megatron.core.parallel_state import Axis

if TYPE_CHECKING:
    from megatron.core.attention.kv_cache import KeyValueCache


@dataclass(frozen=True)
class Batch:
    """One micro-batch: b samples of s tokens, or the s/cp tokens of each that a context-parallel rank holds."""

    tokens: Tensor
    """[b, s] int64."""

    labels: Tensor
    """[b, s] int64: the token that follows each."""

    loss_mask: Tensor
    """[b, s] float: 1 where the loss counts, 0 where it does not."""

    sample_index: Tensor
    """[b] int64: number of each sample in the run. Dropout masks follow from it, so every layout has the same."""

    position_ids: Tensor | None = None
    """[b, s] int64; None for 0 .. s-1."""

    document_ids: Tensor | None = None
    """[b, s] int64: tokens attend to tokens of equal id only, which are adjacent; None for one document a sample."""

    documents: Documents | None = None
    """Where the documents of the whole samples begin: `document_ids` of all context-parallel ranks, on the host."""

    places: Tensor | None = None
    """[s/cp] int64: index of these tokens in their samples; None for 0 .. s-1. Dropout masks follow from it, and so do
    positions without `position_ids`."""

    aux_scale: Tensor | None = None
    """Scalar: factor of the gradients of auxiliary losses, which are sums over tokens
    (`megatron.core.moe.load_balancing`); None without auxiliary losses."""

    number: int = 0
    """Number of the micro-batch in its step."""

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> Batch:
        """A batch from tokens [b, s] alone: each token predicts the next one, and the last predicts nothing."""
        labels = torch.roll(tokens, -1, dims=1)
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
        loss_mask[:, -1] = 0
        return cls(tokens, labels, loss_mask, torch.arange(tokens.shape[0], device=tokens.device))

    @property
    def num_tokens(self) -> Tensor:
        """Scalar on the device: tokens whose loss counts."""
        return self.loss_mask.sum()

    def local_to(self, cp: Axis) -> Batch:
        """The shard of a context-parallel rank: [b, s] -> [b, s/cp]. Reads `document_ids` on the host."""
        documents = self.documents
        if documents is None and self.document_ids is not None:
            documents = document_starts(self.document_ids.tolist())
        if cp.size == 1:
            return replace(self, documents=documents)
        assert self.places is None, "the batch is sharded already"
        spans = rank_spans(self.tokens.shape[1], cp.rank, cp.size)
        places = torch.cat([torch.arange(span.start, span.stop, device=self.tokens.device) for span in spans])
        sequences = ("tokens", "labels", "loss_mask", "position_ids", "document_ids")
        shards = {name: value[:, places] for name in sequences if (value := getattr(self, name)) is not None}
        return replace(self, **shards, documents=documents, places=places)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`. Copies to a GPU do not block."""
        moved: dict[str, Any] = {name: copied_to(tensor, device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that hold a tensor."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class BatchContext:
    """What layers need of a micro-batch besides its hidden states. A stage derives it once per forward pass."""

    sample_index: Tensor
    """[b] int64."""

    position_ids: Tensor | None = None
    """[b, s]; None for 0 .. s-1, or with a cache for its length and up."""

    document_ids: Tensor | None = None
    """[b, s]; None for one document a sample. Read in generation only; training reads `documents`."""

    documents: Documents | None = None
    """Where the documents of the whole samples begin; None for one document a sample."""

    places: Tensor | None = None
    """[s/cp] index of the tokens in their samples; None for 0 .. s-1."""

    rotary: Mapping[Rotation, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines [s, 1 or b, 1, rotary_dim / 2] of each rotary embedding that the stage's layers have."""

    masks: Mapping[Span, Tensor | None] = field(default_factory=dict)
    """With a cache, for each span that the stage's layers have: [1 or b, 1, s, keys] bool, true where a query sees a
    cached key; None for plain causal attention."""

    cache: KeyValueCache | None = None
    """Keys and values of earlier tokens, in generation."""

    aux_scale: Tensor | None = None
    """As in `Batch`."""

    number: int = 0
    """As in `Batch`."""

    @classmethod
    def of(cls, batch: Batch, cache: KeyValueCache | None = None) -> BatchContext:
        """The context of a batch; the stage adds `rotary` and `masks`."""
        documents = batch.documents
        if documents is None and batch.document_ids is not None and cache is None:
            documents = document_starts(batch.document_ids.tolist())
        shared = ("sample_index", "position_ids", "document_ids", "places", "aux_scale", "number")
        return cls(**{name: getattr(batch, name) for name in shared}, documents=documents, cache=cache)

    def places_of(self, x: Tensor, tp_rank: int) -> Tensor:
        """x [n, ...] -> [n]: index in their samples of the tokens of x.

        x is what this context-parallel rank holds of the sequence (`tp_rank` 0), or under sequence parallelism the
        shard of it of tensor-parallel rank `tp_rank`."""
        rows = slice(tp_rank * x.shape[0], (tp_rank + 1) * x.shape[0])
        if self.places is not None:
            return self.places[rows]
        return torch.arange(rows.start, rows.stop, device=x.device)
