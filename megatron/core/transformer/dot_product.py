"""The core of attention: scores, mask, softmax, weighted values.

All cores take q [s, b, heads, d], k and v [keys, b, groups, d] and return [s, b, heads * d]; heads of one group lie
side by side. `attention_mask` says who sees whom, `KeyValueCache` holds the past while text is generated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.random import attention_dropout
from megatron.core.transformer.context import BatchContext


class KeyValueCache:
    """Keys and values of all earlier tokens, by layer, for at most `max_length` tokens.

    A forward pass appends to every layer and then calls `advance` once, so that all layers of it see one `length`.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.document_ids: Tensor | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [s, b, groups, d] of the new tokens -> those of all tokens so far, theirs last."""
        stop = self.length + k.shape[0]
        if layer not in self._layers:
            shape = (self.max_length, *k.shape[1:])
            self._layers[layer] = (k.new_empty(shape), v.new_empty(shape))
        keys, values = self._layers[layer]
        assert stop <= self.max_length, f"{stop} tokens in a cache made for {self.max_length}"
        keys[self.length : stop] = k
        values[self.length : stop] = v
        return keys[:stop], values[:stop]

    def append_documents(self, document_ids: Tensor | None) -> Tensor | None:
        """document_ids [b, s] of the new tokens -> of all tokens so far. Given always or never."""
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
    window: int | None,
    documents: Tensor | None,
    key_documents: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """[1 or b, 1, queries, keys] bool, true where a query sees a key; None where plain causal attention says it all.

    The queries are the last of the keys. A query sees at most `window` keys, its own included, and keys of its own
    document only: `documents` [b, queries], `key_documents` [b, keys].
    """
    if (window is None or window >= keys) and documents is None and queries in (1, keys):
        return None
    key_at = torch.arange(keys, device=device)
    query_at = key_at[keys - queries :, None]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    seen = seen[None]
    if documents is not None:
        assert key_documents is not None
        seen = seen & (documents[:, :, None] == key_documents[:, None, :])
    return seen.unsqueeze(1)


class FusedAttention(nn.Module):
    """torch's scaled_dot_product_attention: flash kernels, no [s, s] matrix kept."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        queries, _, heads, _ = q.shape
        keys, groups, mask = k.shape[0], k.shape[2], context.mask
        assert mask is not None or queries in (1, keys), "queries behind a cache need a mask"
        if mask is not None:  # kernels that take a mask want as many key heads as query heads
            k, v = (x.repeat_interleave(heads // groups, dim=2) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3),
            k.permute(1, 2, 0, 3),
            v.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None and queries == keys,
            scale=self.scale,
            enable_gqa=mask is None and heads != groups,
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class DropoutAttention(nn.Module):
    """Attention with dropout of its weights, each step on its own: the masks must not depend on the layout.

    `head_offset` is the number of this rank's first head. Softmax is fp32 for 16-bit inputs. Outside training there
    is no dropout, and the fused core does the work.
    """

    def __init__(self, scale: float, p: float, key: int, head_offset: int) -> None:
        super().__init__()
        self.scale, self.p, self.key, self.head_offset = scale, p, key, head_offset
        self.fused = FusedAttention(scale)
        self.softmax_dtype = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        if not self.training:
            return self.fused(q, k, v, context)
        s, b, heads, d = q.shape
        groups, mask = k.shape[2], context.mask
        if mask is None:
            mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
        # Scaled before the product, which in fp16 might overflow.
        grouped = (q * self.scale).view(s, b, groups, heads // groups, d).permute(1, 2, 3, 0, 4).flatten(2, 3)
        scores = grouped.matmul(k.permute(1, 2, 3, 0)).view(b, heads, s, s).masked_fill_(~mask, float("-inf"))
        probs = scores.softmax(-1, dtype=self.softmax_dtype.get(q.dtype, q.dtype)).to(q.dtype)
        probs = attention_dropout(probs, self.p, self.key, context.sample_index, head_offset=self.head_offset)
        out = probs.view(b, groups, -1, s).matmul(v.permute(1, 2, 0, 3))  # [b, groups, n * s, d]
        return out.view(b, heads, s, d).permute(2, 0, 1, 3).flatten(2)
