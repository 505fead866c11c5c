"""One pre-norm transformer layer."""

from __future__ import annotations

from math import sqrt

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.dropout import dropout
from megatron.core.moe.layer import MoELayer
from megatron.core.param_meta import Init
from megatron.core.seeds import site_key
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import build_norm, sequence_partial
from megatron.core.transformer.recompute import with_input_recomputed
from megatron.core.transformer.self_attention import SelfAttention


class HiddenDropout(nn.Module):
    """Dropout of hidden states with a mask that is the same at every layout."""

    def __init__(self, name: str, p: float, seed: int, ctx: TPContext) -> None:
        super().__init__()
        self.p, self.key = p, site_key(seed, name)
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

    def __init__(self, number: int, config: TransformerConfig, ctx: TPContext, seed: int) -> None:
        super().__init__()
        name, ctx = f"decoder.layers.{number}", ctx.of_layer(number)
        init = Init("normal", config.init_method_std)
        # What is added to the residual stream starts smaller, so that the stream's variance does not grow with depth.
        output_init = Init("normal", config.init_method_std / sqrt(2 * config.num_layers))
        kind, size, eps = config.normalization, config.hidden_size, config.norm_epsilon
        partial = sequence_partial(ctx)
        self.number = number
        self.input_layernorm = build_norm(kind, f"{name}.input_layernorm", size, eps, ctx, partial)
        self.self_attention = SelfAttention(f"{name}.self_attention", number, config, ctx, seed, init, output_init)
        self.attention_dropout = HiddenDropout(f"{name}.self_attention.dropout", config.hidden_dropout, seed, ctx)
        self.pre_mlp_layernorm = build_norm(kind, f"{name}.pre_mlp_layernorm", size, eps, ctx, partial)
        mlp = MoELayer if number in config.moe_layers else MLP
        self.mlp: MoELayer | MLP = mlp(f"{name}.mlp", config, ctx, init, output_init)
        self.mlp_dropout = HiddenDropout(f"{name}.mlp.dropout", config.hidden_dropout, seed, ctx)
        self.recompute_norms = "layernorm" in config.recomputed_modules

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism"""
        x = x + self.attention_dropout(self._normed(self.input_layernorm, x, self.self_attention, context), context)
        return x + self.mlp_dropout(self._normed(self.pre_mlp_layernorm, x, self.mlp, context), context)

    def _normed(self, norm: nn.Module, x: Tensor, sublayer: nn.Module, context: BatchContext) -> Tensor:
        if self.recompute_norms and self.training:
            return with_input_recomputed(norm, x, sublayer, context)
        return sublayer(norm(x), context)
