"""Transformer layer with attention and an MLP or experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.dropout import dropout
from megatron.core.init import site_key
from megatron.core.moe.layer import MoELayer
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.recompute import with_input_recomputed


class HiddenDropout(nn.Module):
    """Dropout of hidden states. The mask is the same under every parallel layout."""

    def __init__(self, name: str, p: float, ctx: TPContext) -> None:
        super().__init__()
        self.p, self.key = p, site_key(ctx.seed, name)
        self.sequence_rank = ctx.tp.rank if ctx.sequence_parallel else 0
        self.compiled = ctx.compiled

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Apply dropout to x [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        if not self.training or self.p == 0:
            return x
        places = context.places_of(x, self.sequence_rank)
        return dropout(x, self.p, self.key, context.sample_index, places, self.compiled)


Sublayer = Callable[[Tensor, BatchContext], Tensor]
"""Function that maps hidden states [s, b, h] to the output of a sublayer [s, b, h]."""

Residual = Callable[[Tensor, Sublayer, BatchContext], Tensor]
"""Function that runs a sublayer and adds its output to the residual stream. The arguments are the residual stream, the
sublayer and the context, and the result is the new residual stream (`megatron.core.config.layers.ResidualModule`)."""


def add_output(x: Tensor, sublayer: Sublayer, context: BatchContext) -> Tensor:
    """Run a sublayer on x, and return the sum of x and the output of the sublayer."""
    return x + sublayer(x, context)


def build_residual(sublayer: str, config: TransformerConfig, ctx: TPContext) -> Residual:
    """Return the function or module that adds the output of a sublayer to the residual stream. `sublayer` is the name
    of the sublayer. If `config.residual` is set, the module is built from the registry RESIDUALS."""
    return add_output if config.residual is None else RESIDUALS.build(config.residual, sublayer, config, ctx)


class TransformerLayer(nn.Module):
    """Transformer layer with two sublayers (attention, and an MLP or experts), or with only one of them.

    Each sublayer f adds dropout(post(f(pre(x)))) to the residual stream x. The functions pre and post are norms or
    identities, depending on `--norm-placement`. With `--norm-placement sum`, each sublayer instead replaces x with
    post(x + dropout(f(x))).
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        p, kind = config.hidden_dropout, config.layer(ctx.layer)

        def norm(of: str, present: bool) -> nn.Module:
            return build_norm(f"{name}.{of}", config.hidden_size, config, ctx) if present else nn.Identity()

        self.mixes, self.has_mlp = kind.mixes, kind.mlp
        if kind.mixes:
            self.input_layernorm = norm("input_layernorm", config.norms_inputs)
            self.self_attention = MIXERS.build(kind.linear or config.attention, f"{name}.self_attention", config, ctx)
            self.post_attention_layernorm = norm("post_attention_layernorm", config.norms_outputs)
            self.attention_dropout = HiddenDropout(f"{name}.self_attention.dropout", p, ctx)
            self.attention_residual = build_residual(f"{name}.self_attention", config, ctx)
        if kind.mlp:
            self.pre_mlp_layernorm = norm("pre_mlp_layernorm", config.norms_apart)
            of_mlp = f"{name}.mlp", config, ctx
            self.mlp = MoELayer(*of_mlp) if kind.experts else self.build_mlp(*of_mlp)
            self.post_mlp_layernorm = norm("post_mlp_layernorm", config.norms_outputs)
            self.mlp_dropout = HiddenDropout(f"{name}.mlp.dropout", p, ctx)
            self.mlp_residual = build_residual(f"{name}.mlp", config, ctx)
        self.recompute_norms = config.norms_inputs and config.recomputes("layernorm")
        self.parallel, self.multiplier = config.parallel_residual, config.residual_multiplier
        self.shares_norm = config.norms_inputs and not config.norms_apart
        self.norms_sums = config.norms_sums

    def build_mlp(self, name: str, config: TransformerConfig, ctx: TPContext) -> nn.Module:
        """Build the MLP of a layer without experts.

        A subclass may override this method to use a different module. The module is called with x [s, b, h] and the
        context, and returns [s, b, h]. Under sequence parallelism, both shapes are [s/tp, b, h].
        """
        return MLP(name, config, ctx)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Run the layer: x [s, b, w] -> [s, b, w], or [s/tp, b, w] -> [s/tp, b, w] under sequence parallelism. The
        width w is `config.residual_size`."""
        if self.norms_sums:
            return self._with_norms_of_sums(x, context)
        if self.shares_norm:
            return x + self._of_norm(self.input_layernorm, x, self._side_by_side, context)
        y = self.attention_residual(x, self._attention, context) if self.mixes else x
        if self.parallel and self.has_mlp:
            return y + self._mlp(x, context)
        return self.mlp_residual(y, self._mlp, context) if self.has_mlp else y

    def _attention(self, x: Tensor, context: BatchContext) -> Tensor:
        y = self.post_attention_layernorm(self._of_norm(self.input_layernorm, x, self.self_attention, context))
        return self._scaled(self.attention_dropout(y, context))

    def _mlp(self, x: Tensor, context: BatchContext) -> Tensor:
        y = self.post_mlp_layernorm(self._of_norm(self.pre_mlp_layernorm, x, self.mlp, context))
        return self._scaled(self.mlp_dropout(y, context))

    def _with_norms_of_sums(self, x: Tensor, context: BatchContext) -> Tensor:
        if self.mixes:
            attended = self.attention_dropout(self.self_attention(x, context), context)
            x = self.post_attention_layernorm(x + self._scaled(attended))
        if self.has_mlp:
            x = self.post_mlp_layernorm(x + self._scaled(self.mlp_dropout(self.mlp(x, context), context)))
        return x

    def _side_by_side(self, normed: Tensor, context: BatchContext) -> Tensor:
        """Run attention and the MLP on the same input `normed` [s, b, h], and return the sum of their outputs."""
        attended = self.post_attention_layernorm(self.self_attention(normed, context))
        mixed = self.post_mlp_layernorm(self.mlp(normed, context))
        return self._scaled(self.attention_dropout(attended, context) + self.mlp_dropout(mixed, context))

    def _of_norm(self, norm: nn.Module, x: Tensor, sublayer: Callable[..., Tensor], context: BatchContext) -> Tensor:
        """Compute sublayer(norm(x)). With --recompute-modules layernorm, the output of the norm is not saved, and the
        backward pass recomputes it."""
        if self.recompute_norms and self.training:
            return with_input_recomputed(norm, x, sublayer, context)
        return sublayer(norm(x), context)

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.multiplier == 1 else y * self.multiplier
