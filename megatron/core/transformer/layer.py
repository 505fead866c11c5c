"""One pre-norm transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.dropout import dropout
from megatron.core.moe.layer import MoELayer
from megatron.core.parts import ATTENTIONS, MLPS
from megatron.core.seeds import site_key
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.recompute import with_input_recomputed


class HiddenDropout(nn.Module):
    """Dropout of hidden states with a mask that is the same at every layout."""

    def __init__(self, name: str, p: float, ctx: TPContext) -> None:
        super().__init__()
        self.p, self.key = p, site_key(ctx.seed, name)
        self.sequence_rank = ctx.tp.rank if ctx.sequence_parallel else 0
        self.compiled = ctx.compiled

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h], or [s/tp, b, h] under sequence parallelism"""
        if not self.training:
            return x
        places = context.places_of(x, self.sequence_rank)
        return dropout(x, self.p, self.key, context.sample_index, places, self.compiled)


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP, or with experts in its place."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        size, p = config.hidden_size, config.hidden_dropout
        self.input_layernorm = build_norm(f"{name}.input_layernorm", size, config, ctx)
        self.self_attention = ATTENTIONS[config.attention_module](f"{name}.self_attention", config, ctx)
        self.attention_dropout = HiddenDropout(f"{name}.self_attention.dropout", p, ctx)
        self.pre_mlp_layernorm = build_norm(f"{name}.pre_mlp_layernorm", size, config, ctx)
        mlp = MoELayer if config.layer(ctx.layer).experts else MLPS[config.mlp_module]
        self.mlp = mlp(f"{name}.mlp", config, ctx)
        self.mlp_dropout = HiddenDropout(f"{name}.mlp.dropout", p, ctx)
        self.recompute_norms = config.recomputes("layernorm")

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism"""
        x = x + self.attention_dropout(self._normed(self.input_layernorm, x, self.self_attention, context), context)
        return x + self.mlp_dropout(self._normed(self.pre_mlp_layernorm, x, self.mlp, context), context)

    def _normed(self, norm: nn.Module, x: Tensor, sublayer: nn.Module, context: BatchContext) -> Tensor:
        if self.recompute_norms and self.training:
            return with_input_recomputed(norm, x, sublayer, context)
        return sublayer(norm(x), context)
