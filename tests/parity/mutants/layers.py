"""Mutants of norms, rotations and activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt import embedding, loss
from megatron.core.param_meta import ParamMeta
from megatron.core.transformer import activations, layer, norm
from tests.parity.mutants.common import mutant, plant


@mutant(activations, "_biased_backward", world="2", tp="2", regions="fused")
def _bias_gradient_of_some_rows(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Gradient of a bias before an activation from a part of the rows."""
    dx, _ = _true_biased_backward(x, *args)
    return dx, dx[1:].sum((0, 1))


_true_biased_backward = activations._biased_backward


@mutant(layer.TransformerLayer, "_side_by_side", world="2", tp="2", block="one norm")
def _no_gradient_of_a_shared_norm(self: layer.TransformerLayer, normed: Tensor, context: BatchContext) -> Tensor:
    """A norm that attention and MLP share gets no gradient."""
    return _true_side_by_side(self, normed.detach(), context)


_true_side_by_side = layer.TransformerLayer._side_by_side


@mutant(embedding, "positions_of", world="2", tp="2sp", style="xglm")
def _positions_of_the_first_part(x: Tensor, context: BatchContext, shard: int) -> Tensor:
    """Sinusoids of the first part of a sequence on every rank."""
    return _true_positions_of(x, context, 0)


_true_positions_of = embedding.positions_of


@mutant(norm.NormOfEachHead, "forward", world="2", tp="2", block="one norm")
def _weights_of_other_heads(self: norm.NormOfEachHead, x: Tensor) -> Tensor:
    """Norms of heads with the weights of other heads."""
    return _true_norm_of_each_head(self, x.flip(2)).flip(2)


_true_norm_of_each_head = norm.NormOfEachHead.forward


@mutant(loss, "output_bias_metas", world="2", tp="2sp", embeddings="biased")
def _bias_as_of_a_sequence(config: TransformerConfig) -> list[ParamMeta]:
    """Bias of logits summed over tensor-parallel ranks as that of a part of the sequence."""
    return [replace(meta, partial_over=("tp",)) for meta in _true_output_bias_metas(config)]


_true_output_bias_metas = loss.output_bias_metas

plant(
    "Sum of squares of a rank's own heads",
    (norm, "reduce_from", lambda x, axis: x),
    world="2",
    tp="2",
    block="wide norms",
)
plant(
    "Gradient of the sum of squares from a rank's own heads",
    (norm, "copy_to", lambda x, axis: x),
    world="2",
    tp="2",
    block="wide norms",
)
