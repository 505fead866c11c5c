"""Transformer layers of one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.layers import LAYERS, RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.activation_store import ActivationStore
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.recompute import Segment, recompute_segments, recomputed
from megatron.core.transformer.rotary import RotaryEmbedding, query_scales


class Pending(Protocol):
    """Residual stream to which the output of the last sublayer has not been added yet. The module that reads the stream
    performs the addition, for example within its own kernel."""

    def added(self) -> Tensor:
        """Add the output of the last sublayer, and return the residual stream [s, b, w]."""


Stream = Tensor | Pending
"""Type of the residual stream that is passed between layers.

A layer whose method `takes_pending()` returns True is called with `pending=True`. The input and the output of this
layer may be `Pending` objects instead of tensors. The final norm can support `Pending` inputs in the same way.
"""


def added(stream: Stream) -> Tensor:
    return stream if isinstance(stream, Tensor) else stream.added()


def takes_pending(module: nn.Module) -> bool:
    takes = getattr(module, "takes_pending", None)
    return takes is not None and takes()


class TransformerBlock(nn.Module):
    """Transformer layers with the given `numbers`, followed by the final norm if `final_norm` is True. A
    `TransformerBlock` may contain no layers.

    If `config.residual` is set, the block with `first=True` converts hidden states to the residual stream, and the
    block with the final norm converts the residual stream back to hidden states. The names of a layer's parameters
    begin with `layer`, which contains the layer number. The names of the final norm's parameters begin with `norm`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ctx: TPContext,
        numbers: Sequence[int],
        *,
        first: bool,
        final_norm: bool,
        layer: str = "decoder.layers.{}",
        norm: str = "decoder.final_layernorm",
        offload: ActivationStore | None = None,
    ) -> None:
        super().__init__()
        of_layers = ((layer.format(n), config.of_layer(n), ctx.of_layer(n)) for n in numbers)
        self.layers = nn.ModuleList(LAYERS.build(config.layer_module, *of_layer) for of_layer in of_layers)
        for built, number in zip(self.layers, numbers, strict=True):
            built.number = number  # type: ignore[assignment]
        residual = RESIDUALS[config.residual] if config.residual is not None else None
        self.enter = partial(residual.enter, config=config) if residual and first else nn.Identity()
        self.leave = residual.leave(norm, config, ctx) if residual and final_norm else nn.Identity()
        final_norm = final_norm and not config.norms_sums
        self.final_layernorm = build_norm(norm, config.hidden_size, config, ctx) if final_norm else nn.Identity()
        self.offload, offloaded = offload, offload.num_layers if offload is not None else 0
        self.segments = recompute_segments(config, len(self.layers), offloaded)
        self.numbers = tuple(numbers)
        self.device = ctx.device
        self.dtype = ctx.dtype
        kinds = [config.layer(number) for number in numbers]
        rotations = dict.fromkeys(kind.rotation for kind in kinds if kind.rotation is not None)
        self.rotary = {rotation: RotaryEmbedding(config, ctx.device, ctx.dtype, rotation) for rotation in rotations}
        """Rotary embeddings, keyed by the `Rotation` of the layers that use them."""
        self._built = kinds
        self.scales_of = partial(query_scales, config) if any(kind.tempered for kind in kinds) else None
        self.sequence_shards = ctx.tp.size if ctx.sequence_parallel else 1
        self.watch: dict[int, Callable[[Stream], None]] = {}
        """Hooks that receive the residual stream after a layer, keyed by the id of the layer module. These hooks are
        not module hooks, because a layer with a module hook cannot return a `Pending` stream.
        """

    def set_positions(self, config: TransformerConfig) -> None:
        """Replace the rotary embeddings with the ones that `config` defines. Layers that share a rotary embedding must
        also share a rotary embedding under `config`."""
        for number, built in zip(self.numbers, self._built, strict=True):
            rotation = config.layer(number).rotation
            if built.rotation is not None and rotation is not None:
                self.rotary[built.rotation] = RotaryEmbedding(config, self.device, self.dtype, rotation)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Run the stage's layers: x [s, b, w] -> [s, b, w], or [s/tp, b, w] -> [s/tp, b, w] under sequence parallelism.
        The width w is `config.residual_size`. Before the first and after the last layer of the model, w is the hidden
        size."""
        context = self._complete(context, x)
        stream: Stream = (x := self.enter(x))
        if self.offload is not None and self.training and torch.is_grad_enabled():
            stream = self._offloaded(x, context, self.offload)
        else:
            for segment in self.segments:
                stream = self._run_segment(segment, stream, context)
        stream = self.leave(stream)
        return self.final_layernorm(stream if takes_pending(self.final_layernorm) else added(stream))

    def _offloaded(self, x: Tensor, context: BatchContext, offload: ActivationStore) -> Stream:
        """Run all layers. The activations that the layers save for the backward pass are offloaded to the store
        `offload`."""
        stream: Stream = x
        through = offload.begin(x, context)
        for segment in self.segments:
            own = (tensor for index in segment.layers for tensor in _own_tensors(self.layers[index]))
            with through.part(segment.offload, own):
                stream = self._run_segment(segment, stream, context)
            through.watch(stream)
        through.end()
        return stream

    def _run_segment(self, segment: Segment, stream: Stream, context: BatchContext) -> Stream:
        if segment.recompute and self.training:
            return recomputed(self._recomputed, segment.layers, added(stream), context)
        return self._run(segment.layers, stream, context)

    def _recomputed(self, layers: range, x: Tensor, context: BatchContext) -> Tensor:
        return added(self._run(layers, x, context))

    def _run(self, layers: range, stream: Stream, context: BatchContext) -> Stream:
        for layer in (self.layers[index] for index in layers):
            pending = takes_pending(layer)
            stream = layer(stream, context, pending=True) if pending else layer(added(stream), context)
            if (watch := self.watch.get(id(layer))) is not None:
                watch(stream)
        return stream

    def _complete(self, context: BatchContext, x: Tensor) -> BatchContext:
        """Return a copy of `context` with additional inputs of the layers: the cosines and sines of the rotary
        embeddings, and the factors by which queries are scaled."""
        if not self.rotary and self.scales_of is None:
            return context
        positions = context.position_ids if context.position_ids is not None else context.places
        if positions is None:
            positions = torch.arange(x.shape[0] * self.sequence_shards, device=x.device)
        rotary = {rotation: table(positions) for rotation, table in self.rotary.items()}
        scales = None if self.scales_of is None else self.scales_of(positions)
        return replace(context, rotary=rotary, query_scales=scales)


def _own_tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()
