"""Differential attention (arXiv 2410.05258, section 2.1). Both query groups of a pair are on the same tensor-parallel
rank."""

from __future__ import annotations

from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention
from megatron.core.attention.logits import HeadRows, RowKind
from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Fused, Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, make_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary import rotate_queries_and_keys, rotate_queries_and_keys_interleaved
from megatron.extensions.attention.differential_attention.flags import DifferentialAttentionFlags

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DifferentialAttention(nn.Module):
    """Attention in which each pair of heads computes (softmax(q1 k1ᵀ) - lambda softmax(q2 k2ᵀ)) [v1, v2]. The result is
    divided by its root mean square and multiplied by 1 - lambda_init.

    Query groups p and p + pairs form a pair, where `pairs` is half the number of groups. The weight of linear_qkv is
    [pairs, 2, q_per_group + 2, head_dim, h]; each group consists of its query heads, its key and its value. Each layer
    has one lambda: exp(lambda_q1 · lambda_k1) - exp(lambda_q2 · lambda_k2) + lambda_init. The four vectors are trained.
    The constant lambda_init depends only on the layer number, and is larger in later layers.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.layer, self.head_dim = ctx.layer, width
        self.queries = config.queries_per_group
        self.eps, self.first = config.norm_epsilon, 0.8 - 0.6 * exp(-0.3 * ctx.layer)
        rows = (config.query_groups // 2, 2, self.queries + 2, width)
        bias, hidden = config.add_bias_linear, config.hidden_size
        fused = Fused("qkv", 2, (self.queries, 1, 1))
        qkv = ColumnLinear(f"{name}.linear_qkv", hidden, rows, bias or config.add_qkv_bias, fused=fused)
        self.linear_qkv = column_parallel(qkv, ctx)
        of_output = bias or config.add_attention_output_bias
        self.linear_proj = row_parallel(RowLinear(f"{name}.linear_proj", heads * width, hidden, of_output), ctx)
        init = Init("normal", std=config.options(DifferentialAttentionFlags).differential_lambda_std)
        # Each tensor-parallel rank computes lambda for its own heads. The gradients of the four vectors are therefore
        # partial sums, which must be added over the ranks.
        metas = [ParamMeta(f"{name}.{of}", (width,), init=init, partial_over=("tp",), role="vector") for of in VECTORS]
        self.lambdas = nn.ParameterList(make_parameter(meta, ctx) for meta in metas)
        self.core = CoreAttention(name, config, ctx)
        self.recompute_core = config.recomputes("core_attn")
        self.rotation = config.layer(ctx.layer).rotation
        self.rotate = rotate_queries_and_keys_interleaved if config.rotary_interleaved else rotate_queries_and_keys

    def forward(self, x: Tensor, context: BatchContext, addend: Tensor | None = None) -> Tensor:
        """Return the attention output for the input x. The input and the output are [s, b, h]; sequence parallelism
        divides s by tp, and context parallelism divides s by cp."""
        qkv = self.linear_qkv(x).unflatten(-1, (-1, 2, self.queries + 2, self.head_dim))
        q, k, v = qkv.split((self.queries, 1, 1), dim=4)
        q, k = q.flatten(2, 4), k.flatten(2, 4)
        if self.rotation is not None:
            q, k = self.rotate(q, k, *context.rotary[self.rotation])
        both = v.flatten(3, 5)  # [s, b, pairs/tp, 2 d], the values of both heads of each pair
        out = self._attend(q, k, torch.stack((both, both), dim=3).flatten(2, 3), context)
        first, second = out.unflatten(-1, (-1, 2, self.queries, 2 * self.head_dim)).unbind(3)
        difference = first - self._factor().to(second.dtype) * second
        normed = F.rms_norm(difference, (2 * self.head_dim,), None, self.eps) * (1 - self.first)
        return self.linear_proj(normed.flatten(2), addend=addend)

    def logit_rows(self) -> tuple[HeadRows, ...]:
        """Describe which weight rows of linear_qkv produce the queries, the key and the value of each group."""
        kinds = (RowKind.QUERY, self.queries), (RowKind.KEY, 1), (RowKind.OTHER, 1)
        return (HeadRows(self.linear_qkv, self.queries, tuple((kind, count * self.head_dim) for kind, count in kinds)),)

    def _factor(self) -> Tensor:
        """Compute lambda from the four trained vectors. Lambda is fp32 if the vectors are 16-bit."""
        q1, k1, q2, k2 = (each.float() if each.itemsize == 2 else each for each in self.lambdas)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.first

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        """Return the attention outputs [s, b, heads/tp * 2 d] of this rank's heads. During generation, queries also
        attend to cached tokens."""
        if context.cache is not None and (seen := context.cache.append(self.layer, k, v)) is not None:
            k, v = seen
            return self.core.behind_cache(q, k, v, context.cache)
        if self.recompute_core and self.training:
            return recomputed(self.core, q, k, v, context)
        return self.core(q, k, v, context)
