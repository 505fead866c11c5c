"""The core of attention: scores, softmax, weighted values, by the way that fits.

Operands are q [s, b, heads, d], k and v [keys, b, groups, d]; heads of one group lie side by side.
`KeyValueCache` holds the past while text is generated, and `attention_mask` says who sees whom of it.
"""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config import TransformerConfig
from megatron.core.context_parallel.flash import flash_kernel
from megatron.core.context_parallel.gathered import gathered_attention
from megatron.core.context_parallel.kernels import Dropout, TorchKernel
from megatron.core.context_parallel.ring import Causal, local_attention, ring_attention
from megatron.core.context_parallel.ulysses import ulysses_attention
from megatron.core.tensor_parallel.layers import TPContext
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        queries, _, heads, _ = q.shape
        keys, groups = k.shape[0], k.shape[2]
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
        return out.permute(2, 0, 1, 3)


CONTEXT_PARALLEL = {"p2p": ring_attention, "all_gather": gathered_attention, "a2a": ulysses_attention}
"""By --cp-comm-type."""


class CoreAttention(nn.Module):
    """The core of a layer: whichever way of computing it the model, the layout and the batch call for.

    Plain causal attention within a rank, and attention to cached keys, are torch's. Documents, windows, sequences cut
    over ranks and dropout of weights (the same mask at every layout) are computed tile by tile.
    """

    def __init__(self, config: TransformerConfig, ctx: TPContext, key: int) -> None:
        super().__init__()
        self.scale, self.window, self.cp = 1 / sqrt(config.head_dim), config.window_size, ctx.cp
        self.p, self.key = config.attention_dropout, key
        self.fused = FusedAttention(self.scale)
        self.kernel = flash_kernel(self.scale, ctx.dtype, ctx.device, config.head_dim)
        self.across_ranks = CONTEXT_PARALLEL[ctx.cp_comm_type] if ctx.cp.size > 1 else None
        heads = config.num_attention_heads // ctx.tp.size
        self.first_head = heads * ctx.tp.rank
        if self.across_ranks is ulysses_attention:
            self.first_head += heads // ctx.cp.size * ctx.cp.rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        """q [s, b, heads, d], k and v [keys, b, groups, d] -> [s, b, heads * d]"""
        dropout = self.p > 0 and self.training
        windowed = self.window is not None and self.window < k.shape[0]
        if context.cache is not None:
            out = self.fused(q, k, v, context.mask)
        elif self.across_ranks is not None:
            out = self.across_ranks(q, k, v, self.cp, self._causal(context, dropout))
        elif dropout or windowed or context.documents is not None:
            out = local_attention(q, k, v, self._causal(context, dropout))
        else:
            out = self.fused(q, k, v)
        return out.flatten(2)

    def _causal(self, context: BatchContext, dropout: bool) -> Causal:
        kernel = self.kernel
        if dropout:
            kernel = TorchKernel(self.scale, Dropout(self.p, self.key, self.first_head, context.sample_index))
        return Causal(kernel, context.documents, self.window)
