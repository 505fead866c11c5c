"""Cache of earlier tokens for generation, and the attention mask over cached keys."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.config.layers import Span


class KeyValueCache:
    """Keys and values of all earlier tokens, or the latents that they are projected from, by layer, for at most
    `max_length` tokens.

    A forward pass appends to every layer and then calls `advance` once, so that all its layers see the same `length`.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.document_ids: Tensor | None = None
        self.states: dict[int, tuple[Tensor, ...]] = {}
        """What layers with linear attention keep of all earlier tokens, by layer. Replaced in each forward pass."""
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [s, b, ...] of the new tokens -> [length + s, b, ...] of all tokens so far."""
        stop = self.length + new[0].shape[0]
        if layer not in self._layers:
            self._layers[layer] = tuple(x.new_empty(self.max_length, *x.shape[1:]) for x in new)
        assert stop <= self.max_length, f"{stop} tokens in a cache made for {self.max_length}"
        cached = self._layers[layer]
        for kept, x in zip(cached, new, strict=True):
            kept[self.length : stop] = x
        return tuple(kept[:stop] for kept in cached)

    def append_documents(self, document_ids: Tensor | None) -> Tensor | None:
        """document_ids [b, s] of the new tokens -> [b, length + s] of all tokens so far. Give them always or never."""
        assert self.length == 0 or (document_ids is None) == (self.document_ids is None)
        if document_ids is not None and self.document_ids is not None:
            document_ids = torch.cat((self.document_ids, document_ids), dim=1)
        self.document_ids = document_ids
        return document_ids

    def advance(self, tokens: int) -> None:
        """Ends a forward pass over `tokens` new tokens."""
        self.length += tokens


def attention_mask(
    queries: int,
    keys: int,
    span: Span,
    documents: Tensor | None,
    key_documents: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """[1 or b, 1, queries, keys] bool, true where a query sees a key; None where plain causal attention suffices.

    The queries are the last of the keys. A query sees the keys of `span`, and those of its own document only:
    `documents` [b, queries], `key_documents` [b, keys].
    """
    if not span.hides(keys) and documents is None and queries in (1, keys):
        return None
    key_at = torch.arange(keys, device=device)
    query_at = key_at[keys - queries :, None]
    seen = key_at <= query_at
    if span.window is not None:
        seen &= key_at > query_at - span.window
    seen = seen[None]
    if documents is not None:
        assert key_documents is not None
        seen = seen & (documents[:, :, None] == key_documents[:, None, :])
    if span.chunk is not None:
        chunks = _places(key_at, key_documents) // span.chunk
        seen = seen & (chunks[:, keys - queries :, None] == chunks[:, None, :])
    return seen.unsqueeze(1)


def _places(key_at: Tensor, key_documents: Tensor | None) -> Tensor:
    """[1 or b, keys]: place of each key in its document; key_at [keys], key_documents [b, keys]"""
    if key_documents is None:
        return key_at[None]
    begins = torch.ones_like(key_documents, dtype=torch.bool)
    begins[:, 1:] = key_documents[:, 1:] != key_documents[:, :-1]
    return key_at - torch.where(begins, key_at, 0).cummax(dim=1).values
