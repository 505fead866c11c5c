"""Factors by which muP and CompleteP scale a parameter's hyperparameters when the model becomes wider or deeper. This
module does not import torch.

The factors follow table 8 of muP (arXiv 2203.03466), which also permits tied embeddings, and table 1 of CompleteP
(arXiv 2505.01618). The logits are multiplied by 1 / `width`, where `width` is the model's width divided by the base
model's width. The outputs of routers and gates are not multiplied by a factor. The weights of routers and gates
therefore follow table 3 of muP, an equivalent parametrization without output factors.

The scaling rules of all optimizers follow from two numbers, `change` and `gradient`, both relative to the base model.
`change` is the size that the elements of a weight update must have to change the layer's output as much as in the base
model. `gradient` is the size of a gradient element. Adam's updates are proportional to the learning rate, so `change`
multiplies Adam's learning rate. Adam's epsilon is added to gradient magnitudes, so `gradient` multiplies epsilon. SGD's
updates are proportional to the learning rate times the gradient, so `change / gradient` multiplies SGD's learning rate.
The weight decay of one step (learning rate times decay) is the same as in the base model.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.param_meta import ParamMeta

OF_HEADS = (".q_layernorm.", ".k_layernorm.", ".out_norm.")
"""Substrings of the names of norms over a single head. These norms have the same width in all models, because the head
width does not grow. Norms over all heads have the same names, but their weights are sharded."""

OF_CHOICES = ("output_layer.bias", "router.bias", "expert_bias")
"""Name suffixes of biases that have one element per vocabulary token or per expert."""


@dataclass(frozen=True)
class Widths:
    """Input and output sizes of a parameter, divided by its input and output sizes in the base model."""

    inputs: float
    """Ratio of input sizes. The input size of a parameter is the number of terms that are summed for one output."""

    outputs: float


@dataclass(frozen=True)
class Factors:
    """Scaling factors for one parameter, relative to the same parameter in the base model."""

    std: float
    """Factor by which the standard deviation of initial values is multiplied."""

    change: float
    """Factor by which the elements of an optimizer update are multiplied."""

    gradient: float
    """Size of a gradient element, divided by the size in the base model."""

    widths: Widths = Widths(1.0, 1.0)


def factors(meta: ParamMeta, width: float, depth: float, own: Widths | None = None) -> Factors:
    """Return the factors by which muP scales the initial values and updates of a parameter.

    Args:
        meta: The parameter.
        width: Width of the model divided by the width of the base model.
        depth: Depth of the model divided by the depth of the base model.
        own: Ratios of the parameter's input and output sizes to the base model; None to derive the ratios from the
            parameter's role.
    """
    widths = own or usual_widths(meta, width)
    std, change, gradient = _of_widths(meta, widths)
    # initial values do not decrease with depth, because sublayer outputs are multiplied by 1 / depth instead
    if in_block(meta):
        gradient /= depth
        std *= depth**0.5 if meta.to_residual else 1.0
    return Factors(std, change, gradient, widths)


def usual_widths(meta: ParamMeta, width: float) -> Widths:
    """Derive the ratios of a parameter's input and output sizes to the base model from the parameter's role. `width` is
    the model's width divided by the base model's width."""
    if meta.width_kind == "hidden":
        return Widths(width, width)
    if meta.role in ("router", "gate"):
        return Widths(width, 1.0)
    return Widths(1.0, width if widens(meta) else 1.0)


def _of_widths(meta: ParamMeta, widths: Widths) -> tuple[float, float, float]:
    """Return the factors `std`, `change` and `gradient` that result from the model's width alone. The caller then
    applies the factors for depth."""
    inputs, outputs = widths.inputs, widths.outputs
    if meta.width_kind == "hidden":
        return inputs**-0.5, 1 / inputs, 1 / outputs
    if meta.role in ("router", "gate"):
        return 1 / inputs, 1 / inputs, 1 / outputs
    return 1.0, 1.0, 1 / outputs


def widens(meta: ParamMeta) -> bool:
    """Return True if the parameter, an embedding table or a vector, has more elements in a wider model."""
    of_heads = not meta.sharded and any(part in meta.name for part in OF_HEADS)
    return not (of_heads or meta.numel == 1 or meta.name.endswith(OF_CHOICES))


def in_block(meta: ParamMeta) -> bool:
    """Return True if a parameter belongs to a transformer layer of the model or of a multi-token prediction module."""
    return meta.layer is not None or ".transformer_layer." in meta.name


def rate(found: Factors, optimizer: str, matrix_scale: str | None = None) -> float:
    """Return the factor by which muP multiplies the learning rate of `optimizer`. `found` contains the muP factors of
    the parameter. For a matrix that Muon updates, `matrix_scale` is --muon-scale-mode. All optimizers other than SGD
    and Muon are assumed to behave like Adam, whose updates do not depend on the size of gradients.
    """
    if optimizer == "sgd":
        return found.change / found.gradient
    if matrix_scale is None:
        return found.change
    # All singular values of a Muon update are equal. For muP, this value must be proportional to sqrt(outputs / inputs)
    # (arXiv 2310.17813).
    inputs, outputs = found.widths.inputs, found.widths.outputs
    wanted = (outputs / inputs) ** 0.5
    made = {"spectral": max(inputs, outputs) ** 0.5, "unit_rms_norm": wanted, "shape_scaling": max(1.0, wanted)}
    return wanted / made[matrix_scale]
