"""Attention sublayer that multiplies the output of each head by a trainable scale (NormFormer, arXiv 2110.09456).

python pretrain_gpt.py --extension examples/head_scaled_attention.py --attention-module head_scaled ...

The sublayer supports grouped queries, rotary embeddings and generation. The sublayer runs under tensor, sequence,
context and pipeline parallelism. docs/attention_sublayer.md explains the code step by step.
"""

from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention
from megatron.core.batch import BatchContext
from megatron.core.config import TransformerConfig
from megatron.core.config.mixers import MIXERS, AttentionFacts
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, make_sharded_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.rotary import rotate_queries_and_keys


@MIXERS.register("head_scaled", attention=AttentionFacts())
class HeadScaledAttention(nn.Module):
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        h, d, heads, groups = config.hidden_size, config.head_dim, config.num_attention_heads, config.query_groups
        self.layer, self.head_dim, self.heads_of_group = ctx.layer, d, heads // groups
        self.rotation = config.layer(ctx.layer).rotation  # `rotation` is None in layers without rotary embedding.
        # The query heads, the key and the value of a group are adjacent rows, so that every rank holds whole groups.
        rows = (groups, self.heads_of_group + 2, d)
        self.qkv = column_parallel(ColumnLinear(f"{name}.qkv", h, rows, config.add_bias_linear), ctx)
        self.core = CoreAttention(name, config, ctx)
        # A tensor-parallel rank holds the scales of its heads, and computes the complete gradient of these scales.
        self.scales = make_sharded_parameter(f"{name}.scales", (heads,), ctx, role="vector", init=Init("ones"))
        self.proj = row_parallel(RowLinear(f"{name}.proj", heads * d, h, config.add_bias_linear), ctx)

    def forward(self, x: Tensor, context: BatchContext, addend: Tensor | None = None) -> Tensor:
        """x [s, b, h] -> [s, b, h]. Sequence parallelism divides s by tp, and context parallelism divides s by cp."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.heads_of_group + 2, self.head_dim))  # [s, b, groups/tp, rows, d]
        q, k, v = qkv.split((self.heads_of_group, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)  # q [s, b, heads/tp, d]; k, v [s, b, groups/tp, d]
        if self.rotation is not None:
            q, k = rotate_queries_and_keys(q, k, *context.rotary[self.rotation])
        out = self._attend(q, k, v, context)  # [s, b, heads/tp * d]
        out = (out.unflatten(-1, (-1, self.head_dim)) * self.scales.unsqueeze(-1)).flatten(2)
        return self.proj(out, addend=addend)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        """Apply core attention. During generation, queries also attend to the cached keys and values of earlier
        tokens."""
        if context.cache is not None and (seen := context.cache.append(self.layer, k, v)) is not None:
            return self.core.behind_cache(q, *seen, context.cache)
        return self.core(q, k, v, context)
