"""Micro-batches, and the context of a micro-batch that every layer receives. All modules down to core attention receive
the micro-batch and the context as arguments. No layer stores batch state, so a pipeline stage can have many
micro-batches in flight and recompute any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.tiles import DividesSequences, Documents, Shards, document_starts, even_shards
from megatron.core.config.layers import Rotation, Span
from megatron.core.host_to_device import copied_to
from megatron.core.parallel_state import Axis


@dataclass(frozen=True)
class Batch:
    """One micro-batch of b samples. The batch contains the s tokens of each sample or, on a context-parallel rank, the
    rank's s/cp tokens."""

    tokens: Tensor
    """Token ids [b, s] int64."""

    labels: Tensor
    """Labels [b, s] int64. The label of a token is the next token."""

    loss_mask: Tensor
    """Loss mask [b, s] float: 1 for tokens whose loss counts, 0 for all others."""

    sample_index: Tensor
    """Index of each sample in the order of the run, [b] int64. Dropout masks depend on these indices and not on the
    layout."""

    source_ids: Tensor | None = None
    """Index of the data source of each sample, [b] int64; None if no layer or loss uses it."""

    position_ids: Tensor | None = None
    """Token positions [b, s] int64; None for 0 .. s-1."""

    document_ids: Tensor | None = None
    """Document ids [b, s] int64; None if each sample is one document. Tokens attend only to tokens with the same id.
    Each id occupies a contiguous range of positions."""

    documents: Documents | None = None
    """Start positions of the documents, on the host. Each position counts from the start of the unsharded sample, so
    the positions are computed from the `document_ids` of all context-parallel ranks."""

    shards: Shards | None = None
    """Token positions on each context-parallel rank; None for the default sharding."""

    places: Tensor | None = None
    """Positions [s/cp] int64 of this rank's tokens in their samples; None for 0 .. s-1. Dropout masks depend on these
    positions. If `position_ids` is None, `places` also serves as the token positions.
    """

    aux_scale: Tensor | None = None
    """Scalar by which the gradients of auxiliary losses are multiplied (`megatron.core.moe.load_balancing`).

    `aux_scale` is None if the model has no auxiliary losses.
    """

    loss_seed: Tensor | None = None
    """Gradient of the loss sum, a scalar tensor that autograd receives at the start of the backward pass. In fp16, this
    gradient is the loss scale. None means 1."""

    number: int = 0
    """Number of the micro-batch in its step."""

    future_tokens: Tensor | None = None
    """Later tokens [b, s, N] int64, k = 1 to N positions ahead, for multi-token prediction (`with_future`).

    Tokens beyond the end of the sample are 0. Without multi-token prediction, all fields whose names begin with
    `future_` are None.
    """

    future_labels: Tensor | None = None
    """Later labels [b, s, N] int64, k = 1 to N positions ahead."""

    future_loss_mask: Tensor | None = None
    """Loss mask [b, s, N] float for `future_labels`: 1 if the loss of a label counts, and 0 otherwise."""

    future_position_ids: Tensor | None = None
    """Positions [b, s, N] int64 of `future_tokens` in their documents or samples."""

    @classmethod
    def of_tokens(cls, tokens: Tensor) -> Batch:
        """Make a batch from tokens [b, s] alone. Each token predicts the next token, and the last token predicts
        nothing."""
        labels = torch.roll(tokens, -1, dims=1)
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
        loss_mask[:, -1] = 0
        return cls(tokens, labels, loss_mask, torch.arange(tokens.shape[0], device=tokens.device))

    @property
    def num_tokens(self) -> Tensor:
        """Return the number of tokens whose loss counts, as a scalar on the device."""
        return self.loss_mask.sum()

    def with_future(self, depths: int) -> Batch:
        """Return a copy of the batch in which the `future_` fields are set, for multi-token prediction at depths 1 to
        `depths`. The batch must contain whole samples.

        At depth k, the loss of a token counts if three conditions hold. The loss mask must be 1 for the token and for
        the k tokens after it. The label k positions ahead must be in the token's document. The token must not be among
        the last k tokens of the sample.
        """
        if not depths:
            return self
        assert self.places is None, "the batch is already sharded"
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        positions = places if self.position_ids is None else self.position_ids
        shifts = range(1, depths + 1)
        masks, documents = [self.loss_mask], self.document_ids
        for k in shifts:
            masks.append(masks[-1] * _later(self.loss_mask, k))
        if documents is not None:  # the label of the last token counts as part of the last token's document
            of_labels = torch.cat((documents[:, 1:], documents[:, -1:]), dim=1)
            masks[1:] = [masks[k] * (_later(of_labels, k) == documents) for k in shifts]
        return replace(
            self,
            future_tokens=torch.stack([_later(self.tokens, k) for k in shifts], dim=-1),
            future_labels=torch.stack([_later(self.labels, k) for k in shifts], dim=-1),
            future_loss_mask=torch.stack(masks[1:], dim=-1),
            future_position_ids=torch.stack([_later(positions, k) for k in shifts], dim=-1),
        )

    def local_to(self, cp: Axis, divide: DividesSequences | None = None) -> Batch:
        """Return the shard of a context-parallel rank: [b, s] -> [b, s/cp]. If the batch has `document_ids`, the host
        reads the ids and therefore waits for the device."""
        documents = self.documents
        if documents is None and self.document_ids is not None:
            documents = document_starts(self.document_ids.tolist())
        if cp.size == 1:
            return replace(self, documents=documents)
        assert self.places is None, "the batch is already sharded"
        length, shards = self.tokens.shape[1], None
        if divide is not None and documents is not None:
            shards = divide(documents, length, cp.size)
        spans = (shards or even_shards(length, cp.size)).held[cp.rank]
        places = torch.cat([torch.arange(span.start, span.stop, device=self.tokens.device) for span in spans])
        sequences = ("tokens", "labels", "loss_mask", "position_ids", "document_ids", *FUTURE)
        local = {name: value[:, places] for name in sequences if (value := getattr(self, name)) is not None}
        return replace(self, **local, documents=documents, shards=shards, places=places)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`. Copies to a GPU do not block the host."""
        moved = {name: copied_to(tensor, device) for name, tensor in self.tensors().items()}
        change: Callable[..., Batch] = replace
        return change(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that contain tensors, keyed by field name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


FUTURE = ("future_tokens", "future_labels", "future_loss_mask", "future_position_ids")
"""Fields that hold later tokens, for multi-token prediction."""


def _later(x: Tensor, places: int) -> Tensor:
    """Shift x [b, s] to the left by `places` positions, and fill the end with 0."""
    return F.pad(x[:, places:], (0, places))


class CachedCore(Protocol):
    """Attributes of a `megatron.core.attention.core_attention.CoreAttention` that `EarlierTokens.attend` reads."""

    scale: float
    span: Span
    slopes: Tensor | None
    cap: float | None
    softmax_offset: Tensor | None


class EarlierTokens(Protocol):
    """Cache for text generation. For each of b texts, the cache holds the keys, values and states of the tokens that
    earlier forward passes processed. Each forward pass appends s new tokens to each text. Texts are padded on the
    right. The cache does not support context parallelism."""

    positions: Tensor
    """Positions of the new tokens [b, s]."""

    lengths: Tensor | None
    """Number of new tokens in each text, [b]; None if all texts have s new tokens."""

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...] | None:
        """Store the keys and values [s, b, groups, width] of the new tokens, and return the keys and values [b, groups,
        columns, width] of all tokens, with one column per position in the cache. Return None if there are no earlier
        tokens."""

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return the states [b, ...] of a layer after the earlier tokens; None if there are no earlier tokens."""

    def set_states(self, layer: int, *new: Tensor) -> None:
        """Replace the cached states of layer number `layer`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, core: CachedCore) -> Tensor:
        """Compute attention from the new tokens to all tokens: queries q [s, b, heads, d] of the new tokens, keys k [b,
        groups, columns, d] and values v [b, groups, columns, dv] of all tokens -> [s, b, heads, dv].

        Attention uses the settings of `core`, such as its softmax scale.
        """


@dataclass(frozen=True)
class BatchContext:
    """Properties of a micro-batch that layers need in addition to hidden states. A stage creates one context per
    forward pass."""

    sample_index: Tensor
    """Index of each sample in the order of the run, [b] int64."""

    position_ids: Tensor | None = None
    """Token positions [b, s]; None for 0 .. s-1."""

    documents: Documents | None = None
    """Start positions of the documents in the unsharded samples; None if each sample is one document."""

    shards: Shards | None = None
    """Token positions on each context-parallel rank; None for the default sharding."""

    places: Tensor | None = None
    """Positions [s/cp] of this rank's tokens in their samples; None for 0 .. s-1."""

    rotary: Mapping[Rotation, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cosines and sines [s, 1 or b, 1, rotary_dim / 2] of each rotary embedding used by the stage's layers."""

    query_scales: Tensor | None = None
    """Factors [s, 1 or b, 1, 1] in fp32 that scale the queries of layers with temperature scaling (`tempered`); None if
    the stage has no such layer."""

    cache: EarlierTokens | None = None
    """Cache of the tokens that precede the batch's tokens during generation; None outside generation."""

    tokens: Tensor | None = None
    """Token ids [b, s] int64; None if the context was created without them."""

    aux_scale: Tensor | None = None
    """Scalar by which the gradients of auxiliary losses are multiplied; None if the model has no auxiliary losses."""

    number: int = 0
    """Number of the micro-batch in its step."""

    left: dict[int, Tensor | None] = field(default_factory=dict)
    """Tensors that layers store for later layers of the stage, keyed by layer number."""

    @classmethod
    def of(cls, batch: Batch, cache: EarlierTokens | None = None) -> BatchContext:
        """Create the context of a batch. With a `cache`, the batch's tokens follow the tokens in the cache. The
        pipeline stage sets `rotary` and `query_scales` later."""
        documents = batch.documents
        if documents is None and batch.document_ids is not None:
            assert cache is None, "a generated text is one document"
            documents = document_starts(batch.document_ids.tolist())
        if cache is not None and batch.position_ids is None:
            batch = replace(batch, position_ids=cache.positions)
        shared = ("tokens", "sample_index", "position_ids", "shards", "places", "aux_scale", "number")
        return cls(**{name: getattr(batch, name) for name in shared}, documents=documents, cache=cache)

    def places_of(self, x: Tensor, tp_rank: int) -> Tensor:
        """Return the position of each token of x [n, ...] in the token's sample, [n].

        Without sequence parallelism, x is this context-parallel rank's part of the sequence, and `tp_rank` is 0. Under
        sequence parallelism, that part is sharded over the tensor-parallel ranks, and x is the shard with index
        `tp_rank`.
        """
        rows = slice(tp_rank * x.shape[0], (tp_rank + 1) * x.shape[0])
        if self.places is not None:
            return self.places[rows]
        return torch.arange(rows.start, rows.stop, device=x.device)
