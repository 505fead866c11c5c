"""Compressed attention of DeepSeek-V4: sections 2.3.1 (CSA) and 2.3.2 (HCA) of the technical report.

A query attends to the last tokens of its document, and to compressed keys, each of which is computed from several
consecutive tokens. With a compression ratio of 4, each compressed key covers two windows of 4 tokens, and an indexer
selects the keys that a query attends to. If the compression ratio is larger than 4, a query attends to all compressed
keys of earlier tokens in its document. All heads share one key per token, which also serves as the value. The rotary
embedding rotates the last channels of each key by the position of the key. The position of a compressed key is the
position of the first token that the key is computed from. The attention output of a query is rotated back by the
position of the query. The formulas match Hugging Face's implementation of DeepSeek-V4.

Every tensor-parallel rank computes all keys, but only the queries of its own heads. The keys, and the inputs from which
compressed keys are computed, are all-gathered over the context-parallel ranks. No compressed key spans two documents.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.core_attention import sinks_metas
from megatron.core.attention.tiles import Documents, rank_spans
from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.collectives import all_gather_sequence, copy_to, local_slice
from megatron.core.config.layers import Rotation
from megatron.core.config.model import TransformerConfig
from megatron.core.host_to_device import copied_to
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import (
    ReplicatedParallelLinear,
    TPContext,
    column_parallel,
    make_parameter,
    row_parallel,
)
from megatron.core.tensor_parallel.linear_spec import ReplicatedLinear, RowLinear, sequence_partial
from megatron.core.transformer.norm import HEAD_NORM_PARTIAL_OVER, build_norm
from megatron.core.transformer.rotary import apply_rotary_interleaved
from megatron.extensions.attention.context_parallel.attention import from_rank_order
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags
from megatron.extensions.attention.latent_attention.multi_latent_attention import MultiLatentAttention, latent_linears
from megatron.extensions.attention.sparse_attention.flags import (
    SELECTED,
    CompressedAttentionFlags,
    SparseAttentionFlags,
    ratios,
)
from megatron.extensions.attention.sparse_attention.selected_attention import Keys
from megatron.extensions.attention.sparse_attention.selection import CHUNK, Index, Queries, chunks_of
from megatron.extensions.attention.sparse_attention.sparse_attention import SelectedKeys, indexer_linears, parted


class Windows(NamedTuple):
    """Windows of consecutive tokens from which compressed keys are computed. Every sample is padded to the same number
    of windows: the number of windows in a sample that consists of one document."""

    first: Tensor
    """[windows, 1 or b] int64, position of the first token of each window; 0 for padding."""

    follows: Tensor
    """[windows, 1 or b], True if the window follows another window of the same document."""

    begin: Tensor
    """[s, 1 or b] int64, position of the first token of each token's document."""

    before: Tensor
    """[s, 1 or b] int64, total number of windows in the documents of the sample that precede each token's document."""


def windows_of(documents: Documents | None, length: int, ratio: int, device: torch.device) -> Windows:
    """Divide the documents of each sample into windows of `ratio` tokens. If the last tokens of a document do not fill
    a window, these tokens belong to no window.

    Args:
        documents: For each sample, the positions at which its documents begin; None if every sample is one document.
        length: Tokens per sample.
        ratio: Number of tokens per window; 0 for no windows.
        device: Device of the results.
    """
    if documents is not None:
        return _windows_of_documents(documents, length, ratio, device)
    numbers = torch.arange(length // ratio if ratio else 0, device=device)[:, None]
    begin = torch.zeros((length, 1), dtype=torch.int64, device=device)
    return Windows(numbers * ratio, numbers > 0, begin, begin)


@lru_cache(maxsize=64)
def _windows_of_documents(documents: Documents, length: int, ratio: int, device: torch.device) -> Windows:
    count, samples = length // ratio if ratio else 0, len(documents)
    first, follows = np.zeros((count, samples), np.int64), np.zeros((count, samples), bool)
    begin, before = np.zeros((length, samples), np.int64), np.zeros((length, samples), np.int64)
    for sample, starts in enumerate(documents):
        number = 0
        for start, stop in pairwise((*starts, length)):
            own = (stop - start) // ratio if ratio else 0
            begin[start:stop, sample], before[start:stop, sample] = start, number
            first[number : number + own, sample] = start + ratio * np.arange(own)
            follows[number + 1 : number + own, sample] = True
            number += own
    return Windows(*(copied_to(torch.from_numpy(x), device) for x in (first, follows, begin, before)))


class Compressor(nn.Module):
    """Module that computes compressed keys: weighted means over windows of tokens, normalized and rotated."""

    def __init__(
        self,
        name: str,
        config: TransformerConfig,
        ctx: TPContext,
        *,
        ratio: int,
        width: int,
        partial_over: tuple[str, ...],
    ) -> None:
        """Create the projections. If each compressed key covers two windows, the weight of each projection has two
        blocks of rows. For a token in a window, the outputs of the first block contribute to the key of the next
        window, and the outputs of the second block contribute to the key of the token's own window.

        Args:
            name: Prefix of the parameter names.
            config: Model configuration.
            ctx: Tensor-parallel context of the layer.
            ratio: Tokens per window.
            width: Channels per key.
            partial_over: Axes over whose ranks the parameter gradients are partial sums.
        """
        super().__init__()
        rows = width * (2 if ratio == SELECTED else 1)
        hidden = config.hidden_size
        random = Init("normal", config.init_method_std)
        self.ape = make_parameter(
            ParamMeta(f"{name}.ape", (ratio, rows), {}, random, partial_over, role="convolution"), ctx
        )
        """Biases [ratio, rows] for the positions in a window. The biases are added to the logits whose softmax yields
        the weights of the tokens in the window."""
        self.linear_wkv = ReplicatedParallelLinear(ReplicatedLinear(f"{name}.linear_wkv", hidden, rows, False), ctx)
        self.linear_wgate = ReplicatedParallelLinear(ReplicatedLinear(f"{name}.linear_wgate", hidden, rows, False), ctx)
        self.width = width
        self.norm = build_norm(f"{name}.norm", width, config, ctx, partial_over)
        self.rotary_width = config.options(LatentAttentionFlags).qk_pos_emb_head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Project hidden states x [s, b, h] to the inputs [s, b, 2 * rows] from which compressed keys are computed."""
        return torch.cat((self.linear_wkv(x), self.linear_wgate(x)), dim=-1)

    def keys(self, made_of: Tensor, windows: Windows, packed: bool, *tables: Tensor) -> Tensor:
        """Compute the compressed keys [windows, b, width] of all windows.

        Args:
            made_of: [s, b, 2 * rows], outputs of `forward` for all tokens of the samples.
            windows: Windows into which the samples are divided.
            packed: True if samples may contain several documents. In this case, a window may begin at any token.
            tables: Cosines and sines of the rotary embedding, [s, b, r / 2].
        """
        ratio, (count, samples) = self.ape.shape[0], (len(windows.first), made_of.shape[1])
        if packed:
            at = windows.first[:, None] + torch.arange(ratio, device=made_of.device)[:, None]
            rows = made_of[at, torch.arange(samples, device=made_of.device)]
        else:
            rows = made_of[: count * ratio].unflatten(0, (count, ratio))
        kv, gate = rows.chunk(2, dim=-1)
        gate = gate + self.ape.unsqueeze(1)
        if kv.shape[-1] > self.width:
            (earlier, kv), (of_earlier, gate) = (x.split(self.width, dim=-1) for x in (kv, gate))
            of_earlier = of_earlier.roll(1, 0).masked_fill(~windows.follows[:, None, :, None], -torch.inf)
            kv, gate = torch.cat((earlier.roll(1, 0), kv), dim=1), torch.cat((of_earlier, gate), dim=1)
        weights = gate.to(torch.promote_types(gate.dtype, torch.float32)).softmax(1).to(kv.dtype)
        at = windows.first.expand(-1, samples).unsqueeze(-1)
        of_first = (table.gather(0, at.expand(-1, -1, table.shape[-1])).unsqueeze(2) for table in tables)
        return rotated_last(self.norm((kv * weights).sum(1)).unsqueeze(2), self.rotary_width, *of_first).squeeze(2)


class CompressedIndexer(nn.Module):
    """Indexer of compressed attention. The indexer has separate query heads, head weights and compressed keys, from
    which it computes the scores of the compressed attention keys. The inputs of the indexer receive no gradient."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own, linears = config.options(SparseAttentionFlags), indexer_linears(name, config)
        self.heads, self.width = own.dsa_indexer_n_heads, own.dsa_indexer_head_dim
        self.linear_wq_b = ReplicatedParallelLinear(linears.q, ctx)
        self.linear_weights_proj = ReplicatedParallelLinear(linears.weights, ctx)
        self.compressor = Compressor(
            f"{name}.compressor",
            config,
            ctx,
            ratio=SELECTED,
            width=self.width,
            partial_over=sequence_partial(ctx.sequence_parallel),
        )

    def forward(self, x: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indexer queries, the inputs from which the compressed indexer keys are computed, and the head
        weights. x contains the hidden states [s, b, h]. q contains the query latents [s, b, q_lora_rank], or is x if
        there is no query latent."""
        x, q = x.detach(), q.detach()
        weights = self.linear_weights_proj(x) * (self.heads * self.width) ** -0.5
        return self.linear_wq_b(q).unflatten(-1, (self.heads, self.width)), self.compressor(x), weights


class CompressedKeys(SelectedKeys):
    """Module that attends to the last tokens and to compressed keys, and then projects the outputs of each head
    group."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        # The initial value of sinks is zero, as in Megatron-LM.
        super().__init__(name, config, ctx, config.head_dim, sinks_metas(name, config, Init("zeros")))
        own = config.options(CompressedAttentionFlags)
        shape = own.o_groups, own.o_lora_rank, config.attention_output_size // own.o_groups
        group = ParamMeta(f"{name}.linear_o_group_proj", shape, {"tp": 0}, role="hidden", stacked=1)
        self.linear_o_group_proj = make_parameter(group, ctx)
        self.ratio, self.near = ratios(config)[ctx.layer], own.csa_window_size
        self.rotary_width = config.options(LatentAttentionFlags).qk_pos_emb_head_dim
        rotation = config.layer(ctx.layer).rotation
        assert rotation is not None
        self.rotation: Rotation = rotation
        self.compressors: tuple[Compressor, ...] = ()
        """Compressors of the layer: the compressor of attention keys, followed by the compressor of indexer keys; empty
        if the layer has no compressed keys. The compressors are stored in a tuple because they are submodules of other
        modules, and must not be registered as submodules here."""

    def forward(self, q: Tensor, kv: Tensor, *more: Tensor | BatchContext) -> Tensor:
        """Compute attention and project the outputs of each head group to a low rank. Return the projected outputs [s,
        b, groups/tp * o_lora_rank] of this rank's groups. Under context parallelism, the first dimension is s/cp.

        Args:
            q: [s, b, heads/tp, d], queries after the rotary embedding.
            kv: [s, b, d], keys after the rotary embedding; they are also the values.
            more: Tensors that depend on the layer, followed by the batch context. For a layer with compressed keys, the
                first tensor contains the inputs from which the compressed keys are computed. For a layer with an
                indexer, three more tensors follow: the inputs from which the indexer keys are computed, the indexer
                queries, and the head weights. Under sequence parallelism, the indexer queries and head weights contain
                only this rank's tokens.
        """
        operands, context = parted(more)
        made_of, index = operands[: len(self.compressors)], operands[len(self.compressors) :]
        tables = context.rotary[self.rotation]
        of_tokens = [kv, *made_of, *(table.squeeze(2).expand(-1, kv.shape[1], -1) for table in tables)]
        whole = torch.cat(of_tokens, dim=-1)
        cached = None if context.cache is None else context.cache.append(self.layer, whole.unsqueeze(2))
        if cached is not None:
            whole = cached[0].squeeze(1).transpose(0, 1)
        else:
            whole = from_rank_order(all_gather_sequence(whole, self.cp), self.cp.size)
        kv, *made_of, cos, sin = whole.split([x.shape[-1] for x in of_tokens], dim=-1)
        windows = windows_of(context.documents, len(kv), self.ratio, kv.device)
        near, far = self._seen(q, kv, windows, None if cached is None else context.cache, context)
        if not self.compressors:
            out, *_ = self._attend(q, (Keys(near),), kv)
        else:
            packed = context.documents is not None
            keys, *of_index = (
                compressor.keys(x, windows, packed, cos, sin)
                for compressor, x in zip(self.compressors, made_of, strict=True)
            )
            scored = Index(index[0], of_index[0], index[1]) if index else None
            seen = Keys(far, None if scored is None else self._select(scored, far))
            out, lse, beside = self._attend(q, (Keys(near), seen), kv, keys)
            if scored is not None:
                out = self._with_loss(out, scored, q, keys, seen, context, lse, beside)
        out = rotated_last(out, self.rotary_width, tables[0], -tables[1])
        of_groups = out.unflatten(2, (len(self.linear_o_group_proj), -1)).flatten(3)
        return torch.einsum("sbgd,grd->sbgr", of_groups, self.linear_o_group_proj).flatten(2)

    def _seen(
        self, q: Tensor, kv: Tensor, windows: Windows, cache: EarlierTokens | None, context: BatchContext
    ) -> tuple[Queries, Queries]:
        """Return two ranges for each query of this rank: the range of tokens and the range of compressed keys that the
        query may attend to."""
        (n, b, heads, width) = q.shape
        length = len(kv)
        window = self.near
        ratio = self.ratio
        count = length // ratio if ratio else 0
        of_query = b * max(heads * 3 * window, heads * count, width * min(self.topk, count))
        longest = max(1, min(2 * window, CHUNK // of_query))
        if cache is not None:
            last = cache.positions.t()
            begin = before = torch.zeros_like(last)
            chunks = chunks_of((range(n),), self.rows.size, longest, length)
            near = chunks
        else:
            places = context.places_of(q, 0)
            last = places[:, None]
            begin = windows.begin[places]
            before = windows.before[places]
            chunks = chunks_of(rank_spans(length, self.cp.rank, self.cp.size), self.rows.size, longest)
            near = tuple(
                chunk._replace(first=max(0, chunk.keys - (chunk.rows.stop - chunk.rows.start) - window + 1))
                for chunk in chunks
            )
        of_tokens = Queries((last - window + 1).maximum(begin), last, near, self.hardware, window)
        if not ratio:
            return of_tokens, of_tokens
        far = tuple(chunk._replace(keys=chunk.keys // ratio) for chunk in chunks)
        return of_tokens, Queries(before, before + (last - begin + 1) // ratio - 1, far, self.hardware, count)


class CompressedAttention(MultiLatentAttention):
    """Attention to the keys of recent tokens and to compressed keys. All query heads share one key per token. The
    rotary embedding rotates pairs of adjacent channels, as in DeepSeek's weights. The RMSNorm of query heads has no
    weight."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        # The base class's __init__ is skipped, because it would create parameters that this class does not use.
        nn.Module.__init__(self)
        own, of_groups = config.options(LatentAttentionFlags), config.options(CompressedAttentionFlags)
        linears = latent_linears(name, config)
        self.tp = ctx.tp
        self.width = config.head_dim
        ratio, hidden = ratios(config)[ctx.layer], config.hidden_size
        self.rotary_width, self.rotation = own.qk_pos_emb_head_dim, config.layer(ctx.layer).rotation
        self.linear_q_down = nn.Identity() if linears.q_down is None else ReplicatedParallelLinear(linears.q_down, ctx)
        self.linear_q = column_parallel(linears.q, ctx)
        kv = ReplicatedLinear(f"{name}.linear_kv_proj", hidden, self.width, False)
        self.linear_kv = ReplicatedParallelLinear(kv, ctx)
        """Projection to one vector per token. The vector is both the key and the value of all heads."""
        self.linear_gate = None
        of_norms = replace(config, norm_epsilon=own.latent_norm_epsilon or config.norm_epsilon)
        self.eps = of_norms.norm_epsilon
        norms = {norm: size for norm, size in linears.norms.items() if norm.endswith("q_layernorm")}
        norms |= {f"{name}.kv_layernorm": self.width} if config.qk_layernorm else {}
        self.q_layernorm, self.kv_layernorm = (
            build_norm(norm, norms[norm], of_norms, ctx) if norm in norms else nn.Identity()
            for norm in (f"{name}.q_layernorm", f"{name}.kv_layernorm")
        )
        self.compressor = None
        if ratio:
            self.compressor = Compressor(
                f"{name}.compressor",
                of_norms,
                ctx,
                ratio=ratio,
                width=self.width,
                partial_over=HEAD_NORM_PARTIAL_OVER,
            )
        self.indexer = CompressedIndexer(f"{name}.indexer", of_norms, ctx) if ratio == SELECTED else None
        self.core = core = CompressedKeys(name, config, ctx)
        found = self.compressor, None if self.indexer is None else self.indexer.compressor
        core.compressors, self.rows = tuple(each for each in found if each is not None), core.rows
        rows, biased = (
            of_groups.o_groups * of_groups.o_lora_rank,
            config.add_bias_linear or config.add_attention_output_bias,
        )
        self.linear_proj = row_parallel(RowLinear(f"{name}.linear_proj", rows, hidden, biased), ctx)
        self.to_heads = all_gather_sequence if ctx.sequence_parallel else copy_to
        self.recompute_core = config.recomputes("core_attn")
        self.recompute_heads = config.recomputes("mla_up_proj")

    def _latents(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q = self.q_layernorm(self.linear_q_down(x))
        made_of = () if self.compressor is None else (self.compressor(x),)
        index = () if self.indexer is None else self.indexer(x, q)
        return q, self.kv_layernorm(self.linear_kv(x)), *made_of, *index

    def _heads(self, latents: tuple[Tensor, ...], context: BatchContext) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return the tensors that are passed to `CompressedKeys.forward`."""
        (q, kv, *more) = latents
        width = self.rotary_width
        tables = self._tables(context)
        q = F.rms_norm(self.linear_q(q).unflatten(-1, (-1, self.width)), (self.width,), eps=self.eps)
        kv = rotated_last(self.to_heads(kv, self.tp).unsqueeze(2), width, *tables).squeeze(2)
        heads = rotated_last(q, width, *tables), kv, *(self.to_heads(x, self.tp) for x in more[:1])
        if self.indexer is None:
            return heads
        index_q, made_of, weights = more[1:]
        index_q = rotated_last(index_q, width, *(local_slice(table, self.rows) for table in tables))
        return *heads, all_gather_sequence(made_of, self.rows), index_q, weights

    def _behind_cache(self, latents: tuple[Tensor, ...], cache: EarlierTokens, context: BatchContext) -> Tensor:
        return self._attend(latents, context)  # type: ignore[arg-type]


def rotated_last(x: Tensor, width: int, *tables: Tensor) -> Tensor:
    """Rotate the last `width` channels of x [s, b, heads, d] by the given cosines and sines."""
    plain, rotary = x.split((x.shape[-1] - width, width), dim=-1)
    return torch.cat((plain, apply_rotary_interleaved(rotary, *tables)), dim=-1)
