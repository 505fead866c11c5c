"""One transformer layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.dropout import DropoutMask, add_update, dropout, dropout_mask
from megatron.core.init import site_key
from megatron.core.moe.layer import MoELayer
from megatron.core.parts import ATTENTIONS, LINEAR_ATTENTIONS, MLPS
from megatron.core.tensor_parallel.given_casts import InputCast
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.norm import LayerNorm, add_and_norm, build_norm
from megatron.core.transformer.recompute import with_recomputed

Update = tuple[Tensor, DropoutMask | None]
"""What a sublayer adds to the residual stream, and a dropout mask that is still to be applied to it."""


class Stream(NamedTuple):
    """The residual stream between two layers, whose last addition the next norm makes: x + dropout of the update."""

    x: Tensor
    update: Tensor | None = None
    mask: DropoutMask | None = None

    def added(self) -> Tensor:
        return self.x if self.update is None else add_update(self.x, self.update, self.mask)


class HiddenDropout(nn.Module):
    """Dropout of hidden states with a mask that is the same at every layout."""

    def __init__(self, name: str, p: float, ctx: TPContext) -> None:
        super().__init__()
        self.p, self.key = p, site_key(ctx.seed, name)
        self.sequence_rank = ctx.tp.rank if ctx.sequence_parallel else 0
        self.compiled = ctx.compiled

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h], or [s/tp, b, h] under sequence parallelism"""
        if not self.training or self.p == 0:
            return x
        places = context.places_of(x, self.sequence_rank)
        return dropout(x, self.p, self.key, context.sample_index, places, self.compiled)

    def deferred(self, x: Tensor, context: BatchContext) -> Update:
        """x with the mask that `add_update` is to apply, or x after dropout where nothing is compiled."""
        if not (self.compiled and self.training and self.p > 0):
            return self(x, context), None
        places = context.places_of(x, self.sequence_rank)
        return x, dropout_mask(x, self.p, self.key, context.sample_index, places)


class TransformerLayer(nn.Module):
    """Two sublayers, attention and an MLP or experts, each of which adds dropout(norm(f(norm(x)))) to the residual
    stream x. `--norm-placement` says which of the norms there are."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        p = config.hidden_dropout

        def norm(of: str, present: bool) -> nn.Module:
            return build_norm(f"{name}.{of}", config.hidden_size, config, ctx) if present else nn.Identity()

        self.input_layernorm = norm("input_layernorm", config.norms_inputs)
        kind = config.layer(ctx.layer)
        attention = LINEAR_ATTENTIONS[kind.linear] if kind.linear else ATTENTIONS[config.attention]
        self.self_attention = attention(f"{name}.self_attention", config, ctx)
        self.post_attention_layernorm = norm("post_attention_layernorm", config.norms_outputs)
        self.attention_dropout = HiddenDropout(f"{name}.self_attention.dropout", p, ctx)
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm", config.norms_inputs)
        mlp = MoELayer if kind.experts else MLPS[config.mlp_module]
        self.mlp = mlp(f"{name}.mlp", config, ctx)
        self.post_mlp_layernorm = norm("post_mlp_layernorm", config.norms_outputs)
        self.mlp_dropout = HiddenDropout(f"{name}.mlp.dropout", p, ctx)
        self.recompute_norms = config.norms_inputs and config.recomputes("layernorm")
        self.parallel, self.multiplier = config.parallel_residual, config.residual_multiplier
        self.norms_outputs = config.norms_outputs

    def forward(self, x: Tensor | Stream, context: BatchContext) -> Tensor | Stream:
        """x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism. From a `Stream` to one."""
        if isinstance(x, Tensor):
            return self._next(Stream(x), context).added()
        return self._next(x, context)

    def _next(self, stream: Stream, context: BatchContext) -> Stream:
        x, normed = add_and_norm(self.input_layernorm, *stream, cast=self._cast_of(self.self_attention))
        stream = self._attention(x, normed, context)
        cast = self._cast_of(self.mlp)
        if self.parallel:
            x, normed = add_and_norm(self.pre_mlp_layernorm, x, cast=cast)
            _, update, mask = self._mlp(x, normed, context)
            return Stream(stream._replace(x=x).added(), update, mask)
        x, normed = add_and_norm(self.pre_mlp_layernorm, *stream, cast)
        return self._mlp(x, normed, context)

    def _cast_of(self, sublayer: nn.Module) -> InputCast | None:
        """The casts that a sublayer wants of its input in place of it. Norms that are computed again make none."""
        wants = getattr(sublayer, "input_cast", None)
        return wants() if wants is not None and not (self.recompute_norms and self.training) else None

    def takes_stream(self) -> bool:
        """Whether `forward` may be given a `Stream`: where a norm adds the update in its kernels. Hooks see the sum,
        but for those that say that they take a stream."""
        own, norm = type(self).forward is TransformerLayer.forward, self.input_layernorm
        observed = self._backward_hooks or not all(
            getattr(hook, "takes_stream", False) for hook in self._forward_hooks.values()
        )
        return own and isinstance(norm, LayerNorm) and norm.fuses() and not observed

    def _attention(self, x: Tensor, normed: Tensor, context: BatchContext) -> Stream:
        if self._adds_within(self.self_attention, self.attention_dropout):
            return Stream(self.self_attention(normed, context, addend=x))
        y = self._of_normed(self.input_layernorm, x, normed, self.self_attention, context)
        return Stream(x, *self._update(self.post_attention_layernorm(y), self.attention_dropout, context))

    def _mlp(self, x: Tensor, normed: Tensor, context: BatchContext) -> Stream:
        if self._adds_within(self.mlp, self.mlp_dropout):
            return Stream(self.mlp(normed, context, addend=x))
        y = self._of_normed(self.pre_mlp_layernorm, x, normed, self.mlp, context)
        return Stream(x, *self._update(self.post_mlp_layernorm(y), self.mlp_dropout, context))

    def _adds_within(self, sublayer: nn.Module, dropout: HiddenDropout) -> bool:
        """Whether the last GEMM of a sublayer adds to the residual stream: if nothing comes between the two, and no
        norm before is computed again."""
        plain = not (self.parallel or self.norms_outputs or self.recompute_norms) and self.multiplier == 1
        takes = getattr(sublayer, "takes_addend", None)
        return plain and dropout.p == 0 and takes is not None and takes()

    def _update(self, y: Tensor, dropout: HiddenDropout, context: BatchContext) -> Update:
        return dropout.deferred(y, context) if self.multiplier == 1 else (dropout(y, context) * self.multiplier, None)

    def _of_normed(
        self, norm: nn.Module, x: Tensor, normed: Tensor, sublayer: nn.Module, context: BatchContext
    ) -> Tensor:
        """The sublayer of normed = norm(x)."""
        if self.recompute_norms and self.training:
            return with_recomputed((normed,), norm, x, sublayer, context)
        return sublayer(normed, context)
