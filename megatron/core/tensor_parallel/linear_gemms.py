"""The three GEMMs of a linear layer: Y = X Wᵀ, dX = dY W and dW = dYᵀ X.

`LinearFunction` determines when the GEMMs run and which tensors the ranks exchange. A `LinearGemms` object determines
the precision of the GEMMs.

If a number format such as fp8 is used, the operands of the GEMMs must be cast. A kernel that computes an operand can
cast it while the values are in registers. If the kernel that computes a layer's input also casts it, the uncast input
is not stored. Instead, the layer receives a placeholder tensor to which the cast input is attached (`given_input`). In
the backward pass, the operation that computes the layer's output gradient can also cast this gradient, and sum it over
tokens for the bias gradient (`OutputGradient`). If no such kernel casts an operand, the layer casts it.
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
"""An activation or gradient in the form that a GEMM reads. The `LinearGemms` object that created the operand defines
the meaning of each tensor.

With sequence parallelism, all tensors of an operand are gathered along dim 0 over the tensor-parallel ranks. The first
tensor of an operand contains the values and has the shape of the activation. The other tensors, such as fp8 scales,
have the same size along the sequence dim, or are scalars that apply to the whole sequence.
"""


class Operands(NamedTuple):
    """An activation or gradient in the two forms that the GEMMs of a layer read. The two forms may share their
    tensors."""

    output: Operand
    """Operand of the GEMM that computes Y (for an activation) or dX (for a gradient)."""

    weight_grad: Operand
    """Operand of the GEMM that computes dW. For the layer's input, this operand is saved for the backward pass."""


@dataclass(frozen=True)
class Cuts:
    """Sharding of a linear layer's operands over the tensor-parallel ranks."""

    sequence: bool = False
    """True if the input is sharded along the sequence and gathered before the GEMM."""

    inputs: bool = False
    """True if the layer is row-parallel, that is, if the input features and the input dim of the weight are sharded."""

    outputs: bool = False
    """True if the layer is column-parallel, that is, if the output features and the output dim of the weight are
    sharded."""

    tokens: bool = False
    """True if the input and the output are sharded along the sequence, and the weight is replicated. In this case, the
    input is not gathered."""


class GradCasts(Protocol):
    """Interface between a number format and kernels that cast a gradient when they compute it, so that
    `LinearGemms.cast_grad` is not needed."""

    def grad_order(self, needs_dw: bool) -> Any:
        """Return an object that tells a kernel which casts of the gradient to compute."""

    def given_grad(self, pair: Any, tokens: tuple[int, ...]) -> Operands:
        """Convert `pair` to the form that `LinearGemms.cast_grad` returns. `pair` contains the casts of a gradient
        [*tokens, out] that a kernel has computed."""

    def no_value(self, dtype: torch.dtype) -> Tensor:
        """Return a NaN scalar, which is expanded to a placeholder for a gradient. The placeholder is used if only the
        casts of the gradient are stored, but not the gradient itself."""


@operation
def residual_gemm(
    x: Tensor,
    weight: Tensor,
    addend: Tensor,
    bias: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return addend + x weightᵀ + bias, summed in fp32 and rounded once to the addend's dtype: addend [n, m], x [n, k],
    weight [m, k], bias [m] -> [n, m].

    For fp8 operands, `scales` contains two scalars: the scale of x and the scale of the weight.
    """
    wide = torch.promote_types(addend.dtype, torch.float32)
    total = F.linear(x.to(wide), weight.to(wide))
    total = total if scales is None else total * (scales[0] * scales[1])
    total = total if bias is None else total + bias.to(wide)
    return (total + addend.to(wide)).to(addend.dtype)


class LinearGemms:
    """GEMMs of one linear layer, computed in the precision of the parameters.

    A number format in `LINEAR_FORMATS` can replace this object with its own object that has the same attributes.
    """

    adds_residual = True
    """True if `forward` accepts an addend."""

    splits_tokens = True
    """True if each token is cast and multiplied independently of all other tokens.

    In this case, parts of a sequence can be gathered and multiplied separately, with the methods `forward_rows_`,
    `input_grad_rows_`, `cast_grad_to_gather` and `gathered_grad`.
    """

    grad_casts: GradCasts | None = None
    """Interface with which other kernels can cast gradients for these GEMMs. `grad_casts` is None if the GEMMs read
    gradients without a cast, or if the scales of the casts are not known in advance."""

    def cast_input(self, x: Tensor, needs_dw: bool) -> Operands:
        """Cast the layer input x [s, b, in] to the form that the GEMMs read. The result may be gathered afterwards.
        `needs_dw` is False if the weight gradient is not needed."""
        return Operands((x,), (x,))

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
        """Compute y = x Wᵀ + bias: x [s, b, in], weight [..., in], bias [out] -> y [s, b, out].

        If an addend [s, b, out] is given, return y + addend, which is rounded only once.
        """
        if addend is None:
            return F.linear(x[0], matrix_of(weight), bias)
        return residual_gemm(rows_of(x[0]), matrix_of(weight), rows_of(addend), bias).view(addend.shape)

    def cast_grad(self, dy: Tensor, needs_dw: bool) -> Operands:
        """Cast dY [s, b, out] to the form that the GEMMs read. If dY is gathered, it is gathered before this call."""
        return Operands((dy,), (dy,))

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """Compute dX = dY W: dY [s, b, out], weight [..., in] -> dX [s, b, in]."""
        return dy[0].matmul(matrix_of(weight))

    def forward_rows_(self, out: Tensor, x: Operand, weight: Tensor, bias: Tensor | None) -> None:
        """Write x Wᵀ + bias to out [n, out], for some tokens x [n, in]."""
        matrix = matrix_of(weight).t()
        if bias is None:
            torch.mm(x[0], matrix, out=out)
        else:
            torch.addmm(bias, x[0], matrix, out=out)

    def cast_grad_to_gather(self, dy: Tensor) -> Operand:
        """Cast this rank's shard of dY, [s/t, b, out], to the form that `input_grad_rows_` reads. The result is
        gathered afterwards."""
        return (dy,)

    def input_grad_rows_(self, out: Tensor, dy: Operand, weight: Tensor) -> None:
        """Write dY W to out [n, in], for the output gradients dY [n, out] of some tokens."""
        torch.mm(dy[0], matrix_of(weight), out=out)

    def gathered_grad(self, dy: Operand) -> Operand:
        """Convert the gathered result of `cast_grad_to_gather` to the form that `add_weight_grad_` reads."""
        return dy

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """Add dYᵀ X to `out` [out, in], or overwrite `out` with dYᵀ X if `overwrite` is True."""
        add_product_(out, rows_of(dy[0]), rows_of(x[0]), overwrite)


PLAIN = LinearGemms()


def matrix_of(weight: Tensor) -> Tensor:
    """View a weight [..., in] as a matrix [out, in]."""
    return weight.view(-1, weight.shape[-1])


def rows_of(x: Tensor) -> Tensor:
    """View x [s, b, n] as rows [s * b, n]."""
    return x.reshape(-1, x.shape[-1])


Cast = TypeVar("Cast", bound=Operand)

MadeCasts = dict[tuple[int, str], Operand]
"""Weights that have been cast, keyed by the id of the weight and the kind of cast."""


class WeightCasts:
    """Cache of weights that have been cast to another number format. Within a `with casts.kept()` block, each weight is
    cast only once. Outside of such a block, a weight is cast each time it is used."""

    def __init__(self) -> None:
        self._kept: MadeCasts | None = None

    @contextmanager
    def kept(self, made: MadeCasts | None = None) -> Iterator[None]:
        """Cache the cast weights until the end of the `with` block. The weights must not change within the `with`
        block.

        A nested block uses the cache of the enclosing block. The dictionary `made`, if given, serves as the cache and
        may already contain cast weights.
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
        """Size in bytes of the cached copies."""
        storages = (part.untyped_storage() for made in (self._kept or {}).values() for part in made)
        return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())

    @property
    def keeps(self) -> bool:
        """True if casts are currently cached."""
        return self._kept is not None

    def get(self, weight: Tensor, kind: str, make: Callable[[], Cast]) -> Cast:
        """Return the cast of kind `kind` of a weight. If the cast is not cached, call `make` to compute it."""
        if self._kept is None:
            return make()
        key = id(weight), kind
        if key not in self._kept:
            self._kept[key] = make()
        return cast("Cast", self._kept[key])

    def forget(self, weight: Tensor) -> None:
        """Remove the casts of a weight from the cache, so that the weight is cast again when it is next used."""
        for key in [key for key in self._kept or () if key[0] == id(weight)]:
            del self._kept[key]  # type: ignore[union-attr]

    def keep(self, weight: Tensor, **casts: Operand) -> None:
        """Add casts of a weight to the cache. `casts` maps each kind of cast to an operand."""
        assert self._kept is not None
        self._kept.update({(id(weight), kind): made for kind, made in casts.items()})


class LinearFormat(Protocol):
    """Number format for the GEMMs of all linear layers in a model."""

    layers: range
    """Numbers of the transformer layers whose linear layers use the format."""

    def linear(self, name: str, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> Any:
        """Return the `LinearGemms` of the linear layer `name`.

        Args:
            name: Name of the layer.
            tp: Tensor-parallel axis.
            cuts: Sharding of the layer's operands.
            device: Device of the tensors.
            compiled: True if element-wise functions are compiled.
        """

    def grouped(
        self, expt_tp: Axis, cuts: Cuts, in_one_kernel: bool, compiled: bool, add_weight_grad_: Callable[..., None]
    ) -> Any:
        """Return the `GroupedGemms` of a linear layer of the experts.

        Args:
            expt_tp: Expert tensor-parallel axis.
            cuts: Sharding of the layer's operands.
            in_one_kernel: True if one kernel computes the GEMMs of all experts.
            compiled: True if element-wise functions are compiled.
            add_weight_grad_: Function that adds weight gradients that are computed in the dtype of the parameters.
        """

    def groups_in_one_kernel(self, device: torch.device) -> bool:
        """Return True if one kernel can compute the GEMMs of all experts and read the row counts from device memory."""


def given_input(x: Tensor) -> Operands | None:
    """Return the cast input that is attached to the placeholder tensor `x`, or None if `x` is an ordinary tensor."""
    return getattr(x, "given_casts", None)


class OutputGradient:
    """Channel between a linear layer and the operation that computes the gradient dY of the layer's output. In the
    backward pass, the operation can store casts of dY and the sum of dY over tokens in this object. The layer then
    reads the stored tensors."""

    def __init__(self, gemms: LinearGemms, needs_dw: bool, needs_sum: bool) -> None:
        self.gemms, self.needs_dw = gemms, needs_dw
        self.needs_sum = needs_sum
        """True if the layer needs the sum of dY over tokens, which is the bias gradient."""
        self._made: tuple[Tensor, int, Operands | None, Tensor | None] | None = None

    def order(self) -> Any:
        """Return an object that tells a kernel which casts of dY the layer's GEMMs read.

        The result is None if the GEMMs read dY without a cast, or if the scales of the casts are not known in advance.
        """
        casts = self.gemms.grad_casts
        return None if casts is None else casts.grad_order(self.needs_dw)

    def put(self, grad: Tensor, pair: Any, row_sum: Tensor | None) -> None:
        """Store the results that a kernel computed from the gradient dY, `grad` [s, b, ...]. `pair` contains the casts
        that `order` requested, and `row_sum` is the sum of dY over tokens. Both `pair` and `row_sum` may be None."""
        operands = None
        if pair is not None:
            assert self.gemms.grad_casts is not None
            operands = self.gemms.grad_casts.given_grad(pair, grad.shape[:2])
        self._made = grad, version_of(grad), operands, row_sum

    def put_stand_in(self, pair: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Store the casts `pair` of a gradient that is not stored itself. Return a NaN tensor of shape `shape` as a
        placeholder for the gradient. The operation must pass this placeholder to autograd."""
        assert self.gemms.grad_casts is not None
        grad = self.gemms.grad_casts.no_value(dtype).expand(shape)
        self.put(grad, pair, None)
        return grad

    def take(self, grad: Tensor) -> tuple[Operands | None, Tensor | None]:
        """Return the results that a kernel stored for dY: the casts of dY in the form that `cast_grad` returns, and the
        sum of dY over tokens. `grad` is the gradient that autograd passes to the layer.

        A result is None if no kernel stored it. Both results are None if autograd added another gradient to dY after
        the kernel stored the results, so that `grad` has different values.
        """
        made, self._made = self._made, None
        if made is None or not _same_values(made[0], made[1], grad):
            return None, None
        return made[2:]


def attach(y: Tensor, gradient: OutputGradient | None) -> Tensor:
    """Attach an `OutputGradient` to the output `y` of a layer, so that the operation that consumes `y` can find it."""
    if gradient is not None:
        y.output_gradient = gradient  # type: ignore[attr-defined]
    return y


def gradient_of_output(y: Tensor | None) -> OutputGradient | None:
    return getattr(y, "output_gradient", None)


def _same_values(made: Tensor, version: int, grad: Tensor) -> bool:
    """Return whether `grad` and `made` have the same memory, and this memory has not been modified since the version
    counter of `made` was `version`."""
    storages = (storage_id(x) for x in (made, grad))
    places = {(storage, x.storage_offset(), x.numel()) for storage, x in zip(storages, (made, grad), strict=True)}
    return len(places) == 1 and version_of(made) == version
