"""Core attention, softmax(q kᵀ) v. The model, the layout and the batch determine which kernel computes core attention.

Operands are q [s, b, heads, d], k [s, b, groups, d] and v [s, b, groups, dv], where dv equals d except in multi-latent
attention. The heads of a group are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.backends import CONTEXT_PARALLEL, AttentionOperands
from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal, Dropout, Kernel, TorchKernel
from megatron.core.attention.tiles import cut_documents
from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.config.model import TransformerConfig
from megatron.core.init import site_key
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, make_parameter


class FusedAttention(nn.Module):
    """Attention with torch's scaled_dot_product_attention, whose fused kernels do not store the [s, s] scores."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] -> [s, b, heads,
        dv]."""
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3)


class TorchBackend:
    """Backend with torch's attention kernels, and base class for other backends."""

    always_tiles = False

    def __init__(self, operands: AttentionOperands) -> None:
        self.operands, self.scale = operands, operands.scale

    def causal(self) -> nn.Module:
        return FusedAttention(self.scale)

    def tiles(self) -> tuple[Kernel, Kernel]:
        return TorchKernel(self.scale), TorchKernel(self.scale)

    def dropout(self, dropout: Dropout) -> Kernel:
        return TorchKernel(self.scale, dropout)


class Unfused(TorchBackend):
    """Backend that computes attention in plain torch, without fused kernels."""

    always_tiles = True


def sinks_metas(name: str, config: TransformerConfig, init: Init | None = None) -> list[ParamMeta]:
    """Return a list with the `ParamMeta` of the layer's attention sinks, a tensor with one sink per head. The list is
    empty if the sinks are not learned."""
    if config.softmax_type != "learnable":
        return []
    return [ParamMeta(f"{name}.core.softmax_offset", (config.num_attention_heads,), {"tp": 0}, init, role="sink")]


def build_sinks(config: TransformerConfig, ctx: TPContext, metas: Sequence[ParamMeta]) -> Tensor | None:
    """Build the attention sinks [heads/tp] for --softmax-type: a learned parameter if there is a `ParamMeta` in
    `metas`, zeros for off-by-one, and None for vanilla."""
    for meta in metas:
        return make_parameter(meta, ctx)
    if config.softmax_type == "vanilla":
        return None
    return torch.zeros(config.num_attention_heads // ctx.tp.size, dtype=ctx.dtype, device=ctx.device)


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slopes of all heads of a layer (attention with linear biases, arXiv:2108.12409), as in BLOOM.

    ALiBi adds slope * (key position - query position) to the attention scores of a head before the softmax. ALiBi has
    no parameters and no maximum sequence length.

    If the number of heads is a power of two, the slopes form the geometric sequence from 2^(-8 / heads) to 2^-8
    (section 3). For any other number of heads, let n be the next lower power of two. The first n slopes are the slopes
    for n heads; the remaining slopes are every other slope for 2n heads.
    """
    power = 1 << (heads.bit_length() - 1)
    below = [2 ** (-8 * number / power) for number in range(1, power + 1)]
    between = [2 ** (-4 * number / power) for number in range(1, 2 * (heads - power), 2)]
    return below + between


class CoreAttention(nn.Module):
    """Core attention of one layer.

    torch's fused attention computes causal attention among the tokens of one rank. Attention by tiles
    (`megatron.core.attention.tiles`) handles packed documents, sliding windows, context parallelism, ALiBi, sinks,
    score caps and attention dropout. The dropout mask is the same under every layout.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext, sinks: Sequence[ParamMeta] = ()) -> None:
        """`sinks` contains the `ParamMeta` of the learned attention sinks [heads], or is empty if there are none."""
        super().__init__()
        self.scale = config.attention_scale
        self.span = config.layer(ctx.layer).span
        self.cp = ctx.state.cp
        self.window, self.chunk = self.span.window, self.span.chunk
        self.p, self.key = config.attention_dropout, site_key(ctx.seed, f"{name}.attention_dropout")
        widths = config.head_dim, config.value_head_dim
        operands = AttentionOperands(self.scale, ctx.dtype, ctx.device, *widths)
        self.hardware, self.backend = ctx.hardware, ctx.hardware.attention(ctx.attention_backend, operands)
        self.fused = self.backend.causal()
        self.across_ranks = CONTEXT_PARALLEL[ctx.cp_comm_type] if self.cp.size > 1 else None
        heads = config.num_attention_heads // ctx.tp.size
        self.local_heads, self.first_head = heads, heads * ctx.tp.rank
        first = self.first_head
        if self.across_ranks is not None and CONTEXT_PARALLEL.facts(ctx.cp_comm_type).by_heads:
            sharing = self.cp.levels[0] if self.cp.levels else self.cp
            heads //= sharing.size
            self.first_head += heads * sharing.rank
        self.slopes: Tensor | None = None
        if config.alibi:
            of_heads = alibi_slopes(config.num_attention_heads)[self.first_head : self.first_head + heads]
            self.slopes = torch.tensor(of_heads, dtype=torch.promote_types(ctx.dtype, torch.float32), device=ctx.device)
        self.kernel, self.varlen_kernel = self.backend.tiles()
        self.cap = config.attn_logit_softcapping
        if self.slopes is not None or self.cap is not None:
            self.kernel = self.varlen_kernel = TorchKernel(self.scale, slopes=self.slopes, cap=self.cap)
        # On CPU, torch's fused attention requires that values are as wide as keys.
        unequal = config.value_head_dim != config.head_dim and ctx.device.type != "cuda"
        self.softmax_offset = build_sinks(config, ctx, sinks)
        self.sink_heads = slice(self.first_head - first, self.first_head - first + heads)
        self.of_tiles = config.attends_in_tiles
        self.always_tiles = self.of_tiles or unequal or self.backend.always_tiles
        self.dtype, self.device = ctx.dtype, ctx.device
        self._logit_watchers: list[Callable[[Tensor], None]] = []

    def watch_logits(self, watcher: Callable[[Tensor], None]) -> None:
        """In each training forward pass, call `watcher` with a tensor [heads]: the largest logit of each of this rank's
        heads, in the order of `sink_heads`. Logits are the inputs of the softmax for visible query-key pairs, including
        biases and caps. After the first call of this method, plain torch computes the layer's attention.
        """
        self._logit_watchers.append(watcher)
        self.kernel = self.varlen_kernel = TorchKernel(self.scale, slopes=self.slopes, cap=self.cap, note=self.note)
        self.always_tiles = True

    @property
    def in_torch(self) -> bool:
        """Return True if plain torch computes all attention of this layer, without fused kernels."""
        return self.always_tiles and all(isinstance(x, TorchKernel) for x in (self.kernel, self.varlen_kernel))

    @property
    def note(self) -> Callable[[Tensor], None] | None:
        """Function that passes the largest logits [heads] of a tile to the logit watchers; None if there are no
        watchers."""
        return self._tell_watchers if self._logit_watchers else None

    def _tell_watchers(self, largest: Tensor) -> None:
        if self.training:
            for watcher in self._logit_watchers:
                watcher(largest.detach())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        """Compute core attention: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] -> [s, b, heads *
        dv]."""
        dropout = self.p > 0 and self.training
        hidden = self.span.hides(k.shape[0])
        if self.across_ranks is not None:
            out = self.across_ranks(q, k, v, self.cp, self._causal(q, context, dropout), self._sinks)
        elif self.always_tiles or dropout or hidden or context.documents is not None:
            out = local_attention(q, k, v, self._causal(q, context, dropout), sinks=self._sinks)
        else:
            out = self.fused(q, k, v)
        return out.flatten(2)

    def behind_cache(self, q: Tensor, k: Tensor, v: Tensor, cache: EarlierTokens) -> Tensor:
        """Compute attention from the new tokens to all tokens: q [s, b, heads, d] of the new tokens, k [b, groups,
        columns, d] and v [b, groups, columns, dv] of all tokens -> [s, b, heads * dv]."""
        return cache.attend(q, k, v, self).flatten(2)

    @property
    def _sinks(self) -> Tensor | None:
        """Return the sinks [heads] of the heads that this rank computes."""
        return None if self.softmax_offset is None else self.softmax_offset[self.sink_heads]

    def _causal(self, rows: Tensor, context: BatchContext, dropout: bool) -> Causal:
        """Return the causal mask, and the kernel that applies it, for queries `rows` [s/cp, b, ...]."""
        documents, length = context.documents, rows.shape[0] * self.cp.size
        if self.chunk is not None and self.chunk < length:
            documents = cut_documents(documents, rows.shape[1], length, self.chunk)
        kernel = self.kernel if documents is None and self.window is None else self.varlen_kernel
        if dropout:
            masks = Dropout(self.p, self.key, self.first_head, context.sample_index)
            if self.slopes is None and self.cap is None and self.note is None:
                kernel = self.backend.dropout(masks)
            else:
                kernel = TorchKernel(self.scale, masks, self.slopes, self.cap, self.note)
        return Causal(kernel, documents, self.window, context.shards)
