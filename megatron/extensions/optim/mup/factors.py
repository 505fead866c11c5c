"""The table of muP and CompleteP: how a parameter's numbers change with the model's width and depth. This module does
not import torch.

Table 8 of muP (arXiv 2203.03466), which tied embeddings permit too, and table 1 of CompleteP (arXiv 2505.01618). The
logits have the factor 1 / width. Weights of routers and gates, whose outputs have no factor, follow table 3, which is
the same parametrization without one.

All rules follow from two numbers. `change` is the size of the update of an element that moves outputs as much as in the
base model. `gradient` is the size of an element of the gradient, the width and depth of the base model being 1. Adam's
updates have the size of the learning rate, which is therefore multiplied by `change`, and its epsilon, a size of
gradients, by `gradient`. SGD's updates have the size of learning rate and gradient, so its rate is multiplied by
`change / gradient`. The weight decay of one step, rate times decay, is that of the base model.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.param_meta import ParamMeta

OF_HEADS = (".q_layernorm.", ".k_layernorm.", ".out_norm.")
"""Parts of the names of norms within heads, whose channels do not widen. Norms over all heads are sharded."""

OF_CHOICES = ("output_layer.bias", "router.bias", "expert_bias")
"""Ends of the names of biases with an element for each token of the vocabulary, or for each expert."""


@dataclass(frozen=True)
class Widths:
    """Growth of a parameter's ends: their sizes divided by the sizes in the base model."""

    inputs: float
    """Growth of the number of terms that are summed to one output."""

    outputs: float


@dataclass(frozen=True)
class Factors:
    """Factors of one parameter, relative to the same parameter of the base model."""

    std: float
    """Factor of the standard deviation of initial values."""

    change: float
    """Factor of the elements of an optimizer update."""

    gradient: float
    """Factor of the elements of the gradient that the backward pass computes."""

    widths: Widths = Widths(1.0, 1.0)


def factors(meta: ParamMeta, width: float, depth: float, own: Widths | None = None) -> Factors:
    """The factors of a parameter in a model of `width` and `depth` times those of the base model. `own` are the ratios
    of the parameter itself, where they are not those of its role."""
    widths = own or usual_widths(meta, width)
    std, change, gradient = _of_widths(meta, widths)
    if in_block(meta):  # its output has the factor 1 / depth instead of initial values that shrink
        gradient /= depth
        std *= depth**0.5 if meta.to_residual else 1.0
    return Factors(std, change, gradient, widths)


def usual_widths(meta: ParamMeta, width: float) -> Widths:
    """The ratios of a parameter's role if all widths grow by the ratio `width`."""
    if meta.width_kind == "hidden":
        return Widths(width, width)
    if meta.role in ("router", "gate"):
        return Widths(width, 1.0)
    return Widths(1.0, width if widens(meta) else 1.0)


def _of_widths(meta: ParamMeta, widths: Widths) -> tuple[float, float, float]:
    """`std`, `change` and `gradient` that follow from the width alone."""
    inputs, outputs = widths.inputs, widths.outputs
    if meta.width_kind == "hidden":
        return inputs**-0.5, 1 / inputs, 1 / outputs
    if meta.role in ("router", "gate"):
        return 1 / inputs, 1 / inputs, 1 / outputs
    return 1.0, 1.0, 1 / outputs


def widens(meta: ParamMeta) -> bool:
    """Return whether a table or vector has more elements in a wider model."""
    of_heads = not meta.sharded and any(part in meta.name for part in OF_HEADS)
    return not (of_heads or meta.numel == 1 or meta.name.endswith(OF_CHOICES))


def in_block(meta: ParamMeta) -> bool:
    """Return whether a parameter belongs to a sublayer, whose output is added to the residual stream."""
    return meta.layer is not None or ".transformer_layer." in meta.name


def rate(found: Factors, optimizer: str, matrix_scale: str | None = None) -> float:
    """The factor of the learning rate under an `optimizer`. `matrix_scale` is --muon-scale-mode, for a matrix that
    Muon updates. Updates of optimizers other than SGD and Muon are taken not to grow with gradients, as Adam's.
    """
    if optimizer == "sgd":
        return found.change / found.gradient
    if matrix_scale is None:
        return found.change
    # Muon's updates have one singular value, which must grow as sqrt(outputs / inputs) does (arXiv 2310.17813).
    inputs, outputs = found.widths.inputs, found.widths.outputs
    wanted = (outputs / inputs) ** 0.5
    made = {"spectral": max(inputs, outputs) ** 0.5, "unit_rms_norm": wanted, "shape_scaling": max(1.0, wanted)}
    return wanted / made[matrix_scale]
