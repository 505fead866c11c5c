"""The three GEMMs of a linear layer: y = x Wᵀ, dX = dY W and dW = dYᵀ X.

`LinearFunction` decides when the GEMMs run and which tensors the ranks exchange. A `LinearGemms` decides the precision
of the GEMMs.

Kernels before and after a layer may cast and sum the layer's tensors while the tensors are in registers. If the kernel
that computes a layer's input also casts it, the original input is not stored. In place of the original input, the layer
receives a placeholder tensor to which the cast input is attached (`given_input`). In the backward pass, the operation
that consumes the layer's output computes the output gradient. The same operation casts the output gradient and sums it
for the bias gradient (`OutputGradient`). If no adjacent kernel casts a tensor, the layer casts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import operation
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.weight_grad import add_product_
from megatron.core.torch_private import storage_id, version_of

Operand = tuple[Tensor, ...]
"""An activation in the form that a GEMM reads. The `LinearGemms` that created the operand defines the meaning of each
tensor.

With sequence parallelism, all tensors of an operand are gathered along dim 0 over the tensor-parallel ranks. The first
tensor of an operand has the shape of the activation. The other tensors, such as fp8 scales, have the same size along
the sequence dim. A scalar applies to the whole sequence.
"""


class Operands(NamedTuple):
    """An activation or gradient in the two forms that GEMMs read: one for the output GEMM, and one for the
    weight-gradient GEMM. The two forms may share their tensors."""

    output: Operand
    """Operand of the GEMM that computes Y or dX."""

    weight_grad: Operand
    """Operand of the GEMM that computes dW. The `weight_grad` operand of the layer's input is saved for the backward
    pass."""


@dataclass(frozen=True)
class Cuts:
    """Sharding of a linear layer's operands over the tensor-parallel ranks."""

    sequence: bool = False
    """True if the input is sharded along the sequence and gathered before the GEMM."""

    inputs: bool = False
    """True if the layer is row parallel: the input features are sharded, and so is the weight along its input dim."""

    outputs: bool = False
    """True if the layer is column parallel: the output features are sharded, and so is the weight along its output
    dim."""

    tokens: bool = False
    """True if the input and the output are sharded along the sequence, the input is not gathered, and the weight is not
    sharded."""


class GradCasts(Protocol):
    """Interface for kernels that compute a gradient and also cast it, so that `LinearGemms.cast_grad` is not needed."""

    def grad_order(self, needs_dw: bool) -> Any:
        """Return an object that tells a kernel which casts of the gradient to compute."""

    def given_grad(self, pair: Any, tokens: tuple[int, ...]) -> Operands:
        """Convert `pair` to the form that `cast_grad` returns. `pair` contains the casts that a kernel computed from a
        gradient [*tokens, out]."""

    def no_value(self, dtype: torch.dtype) -> Tensor:
        """Return a NaN scalar. Placeholder tensors, which have attached casts but no values, are expanded from this
        scalar."""


@operation
def residual_gemm(
    x: Tensor,
    weight: Tensor,
    addend: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return addend + x weightᵀ + bias, [n, m], summed in fp32 and rounded once to the addend's dtype. The shapes are:
    addend [n, m], x [n, k], weight [m, k], bias [m].

    For fp8 operands, `scales` contains two scalars: the scale of x and the scale of the weight.
    """
    wide = torch.promote_types(addend.dtype, torch.float32)
    total = F.linear(x.to(wide), weight.to(wide))
    total = total if scales is None else total * (scales[0] * scales[1])
    total = total if bias is None else total + bias.to(wide)
    return (total + addend.to(wide)).to(addend.dtype)


class LinearGemms:
    """GEMMs of one linear layer, computed in the precision of the parameters.

    A number format in `LINEAR_FORMATS` provides an object with the same attributes as this class.
    """

    adds_residual = True
    """True if `forward` accepts an addend."""

    splits_tokens = True
    """True if the tokens are cast and multiplied independently of each other, so that each output row is the same for
    any subset of the tokens.

    If this is True, parts of a sequence can be gathered and multiplied separately, with the methods `forward_rows_`,
    `input_grad_rows_`, `cast_grad_to_gather` and `gathered_grad`.
    """

    grad_casts: GradCasts | None = None
    """Interface through which other kernels can cast gradients for these GEMMs. `grad_casts` is None if the GEMMs read
    uncast gradients, or if the scales are not known in advance."""

    def cast_input(self, x: Tensor, needs_dw: bool) -> Operands:
        """Cast the layer input x [s, b, in], which may be gathered afterwards, to the form that the GEMMs read.
        `needs_dw` is False if the weight gradient is not needed."""
        return Operands((x,), (x,))

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
        """Compute y = x Wᵀ + bias, [s, b, out], from x [s, b, in], weight [..., in] and bias [out].

        If an addend [s, b, out] is given, return y + addend, rounded only once.
        """
        if addend is None:
            return F.linear(x[0], matrix_of(weight), bias)
        return residual_gemm(rows_of(x[0]), matrix_of(weight), rows_of(addend), bias).view(addend.shape)

    def cast_grad(self, dy: Tensor, needs_dw: bool) -> Operands:
        """Cast dY [s, b, out], which was already gathered, to the form that the GEMMs read."""
        return Operands((dy,), (dy,))

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """Compute dX = dY W, [s, b, in], from dY [s, b, out] and weight [..., in]."""
        return dy[0].matmul(matrix_of(weight))

    def forward_rows_(self, out: Tensor, x: Operand, weight: Tensor, bias: Tensor | None) -> None:
        """Write x Wᵀ + bias for the tokens x [n, in] into out [n, out]."""
        matrix = matrix_of(weight).t()
        if bias is None:
            torch.mm(x[0], matrix, out=out)
        else:
            torch.addmm(bias, x[0], matrix, out=out)

    def cast_grad_to_gather(self, dy: Tensor) -> Operand:
        """Cast dY [s/t, b, out], which is gathered afterwards, to the form that `input_grad_rows_` reads."""
        return (dy,)

    def input_grad_rows_(self, out: Tensor, dy: Operand, weight: Tensor) -> None:
        """Write dY W for the gradients dY [n, out] of some tokens into out [n, in]."""
        torch.mm(dy[0], matrix_of(weight), out=out)

    def gathered_grad(self, dy: Operand) -> Operand:
        """Convert `dy` to the form that `add_weight_grad_` reads. `dy` is an output gradient that was cast by
        `cast_grad_to_gather` and then gathered."""
        return dy

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """Add dYᵀ X to out [out, in], or overwrite out with dYᵀ X if `overwrite` is True."""
        add_product_(out, rows_of(dy[0]), rows_of(x[0]), overwrite)


PLAIN = LinearGemms()


def matrix_of(weight: Tensor) -> Tensor:
    """View [..., in] as [out, in]."""
    return weight.view(-1, weight.shape[-1])


def rows_of(x: Tensor) -> Tensor:
    """View [s, b, n] as [s * b, n]."""
    return x.reshape(-1, x.shape[-1])


Cast = TypeVar("Cast", bound=Operand)

MadeCasts = dict[tuple[int, str], Operand]
"""Weight casts, keyed by the id of the weight and the kind of cast."""


class WeightCasts:
    """Cache of weights that are cast to another number format. Within a `kept()` block, each weight is cast only once.
    Outside of such a block, a weight is cast at every use."""

    def __init__(self) -> None:
        self._kept: MadeCasts | None = None

    @contextmanager
    def kept(self, made: MadeCasts | None = None) -> Iterator[None]:
        """Cache the cast weights until the end of the `with` block. The weights must not change within the `with`
        block.

        A nested block reuses the cast weights of the enclosing block. `made` contains weights that are already cast;
        newly cast weights are added to it.
        """
        if self._kept is not None:
            yield
            return
        self._kept = {} if made is None else made
        try:
            yield
        finally:
            self._kept = None

    @property
    def nbytes(self) -> int:
        """Number of bytes in the cached copies."""
        storages = (part.untyped_storage() for made in (self._kept or {}).values() for part in made)
        return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())

    @property
    def keeps(self) -> bool:
        """True if casts are currently cached."""
        return self._kept is not None

    def get(self, weight: Tensor, kind: str, make: Callable[[], Cast]) -> Cast:
        """Return the cast of `kind`, calling `make` if it is not cached."""
        if self._kept is None:
            return make()
        key = id(weight), kind
        if key not in self._kept:
            self._kept[key] = make()
        return cast("Cast", self._kept[key])

    def forget(self, weight: Tensor) -> None:
        """Drop the casts of a weight. At the next use of the weight, it is cast again."""
        for key in [key for key in self._kept or () if key[0] == id(weight)]:
            del self._kept[key]  # type: ignore[union-attr]

    def keep(self, weight: Tensor, **casts: Operand) -> None:
        """Store cast copies of a weight, so that its next use need not cast it. `casts` maps each kind of cast to an
        operand."""
        assert self._kept is not None
        self._kept.update({(id(weight), kind): made for kind, made in casts.items()})


class LinearFormat(Protocol):
    """Number format for the GEMMs of all linear layers in a model."""

    layers: range
    """Numbers of the transformer layers that use the format."""

    def linear(self, name: str, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> Any:
        """Return the `LinearGemms` of the linear layer `name`.

        Args:
            name: Name of the layer.
            tp: Tensor-parallel axis.
            cuts: Sharded operands.
            device: Device of the tensors.
            compiled: True if regions are compiled.
        """

    def grouped(
        self, expt_tp: Axis, cuts: Cuts, in_one_kernel: bool, compiled: bool, add_weight_grad_: Callable[..., None]
    ) -> Any:
        """Return the `GroupedGemms` object that multiplies the rows of an expert layer with its weights.

        Args:
            expt_tp: Expert tensor-parallel axis.
            cuts: Sharded operands.
            in_one_kernel: True if one kernel multiplies all experts.
            compiled: True if regions are compiled.
            add_weight_grad_: Function that computes weight gradients in the dtype of the parameters and adds them.
        """

    def groups_in_one_kernel(self, device: torch.device) -> bool:
        """Return True if one kernel multiplies all experts and reads the row counts on the device."""


def given_input(x: Tensor) -> Operands | None:
    """Return the cast input that is attached to the placeholder tensor `x`. Return None if `x` is an ordinary
    tensor."""
    return getattr(x, "given_casts", None)


class OutputGradient:
    """Gradient dY of a linear layer's output. In the backward pass, the operation that computes dY can attach casts of
    dY to the `OutputGradient`."""

    def __init__(self, gemms: LinearGemms, needs_dw: bool, needs_sum: bool) -> None:
        self.gemms, self.needs_dw = gemms, needs_dw
        self.needs_sum = needs_sum
        """True if the bias gradient is needed, which is the sum of dY over tokens."""
        self._made: tuple[Tensor, int, Operands | None, Tensor | None] | None = None

    def order(self) -> Any:
        """Return an object that tells a kernel which casts of dY the layer's GEMMs read.

        The result is None if the GEMMs read dY without a cast, or if the scales of the cast are not known in advance.
        """
        casts = self.gemms.grad_casts
        return None if casts is None else casts.grad_order(self.needs_dw)

    def put(self, grad: Tensor, pair: Any, row_sum: Tensor | None) -> None:
        """Attach two results that a kernel computed from `grad`, the gradient dY [s, b, ...]: `pair`, the casts
        requested by `order`, and `row_sum`, the sum over tokens."""
        operands = None
        if pair is not None:
            assert self.gemms.grad_casts is not None
            operands = self.gemms.grad_casts.given_grad(pair, grad.shape[:2])
        self._made = grad, version_of(grad), operands, row_sum

    def put_stand_in(self, pair: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Attach the casts `pair` of a gradient [s, b, ...] as in `put`, but without storing the gradient itself.
        Return a NaN tensor of shape `shape` as a placeholder for the gradient."""
        assert self.gemms.grad_casts is not None
        grad = self.gemms.grad_casts.no_value(dtype).expand(shape)
        self.put(grad, pair, None)
        return grad

    def take(self, grad: Tensor) -> tuple[Operands | None, Tensor | None]:
        """Return two results that a kernel computed earlier: `grad` cast to the GEMM format, and the sum of `grad` over
        tokens.

        A result is None if no kernel computed it, or if it no longer belongs to `grad` because another gradient was
        added to dY after the kernel ran.
        """
        made, self._made = self._made, None
        if made is None or not _same_values(made[0], made[1], grad):
            return None, None
        return made[2:]


def attach(y: Tensor, gradient: OutputGradient | None) -> Tensor:
    """Attach an `OutputGradient` to `y`, the output of a layer, so that the operation that consumes `y` can find it."""
    if gradient is not None:
        y.output_gradient = gradient  # type: ignore[attr-defined]
    return y


def gradient_of_output(y: Tensor | None) -> OutputGradient | None:
    return getattr(y, "output_gradient", None)


def _same_values(made: Tensor, version: int, grad: Tensor) -> bool:
    """Return whether `grad` has exactly the memory of `made`, and this memory was not modified since the version
    counter of `made` was `version`."""
    storages = (storage_id(x) for x in (made, grad))
    places = {(storage, x.storage_offset(), x.numel()) for storage, x in zip(storages, (made, grad), strict=True)}
    return len(places) == 1 and version_of(made) == version
