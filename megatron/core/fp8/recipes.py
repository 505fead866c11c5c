"""fp8 scaling recipes: tensorwise, delayed and rowwise GEMMs of a linear layer (arXiv 2209.05433).

Each linear layer has one object. Weights are cast once for all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
from megatron.core.compiled_regions import region
from megatron.core.config.precision import PrecisionConfig
from megatron.core.fp8.casts import (
    E4M3,
    Scaled,
    amax_of,
    amax_of_rows,
    cast_by_amax,
    cast_by_multiplier,
    formats,
    scaled_mm,
    transposed_bytes,
)
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.linear_gemms import PLAIN, Cuts, LinearGemms, Operand, matrix_of, rows_of


class WeightCasts:
    """Cache of fp8 weights. Within `kept()` each weight is cast once; outside it is cast at every use."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Scaled] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps casts until the end of the block, in which weights must not change."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are kept."""
        storages = (part.untyped_storage() for made in (self._kept or {}).values() for part in made)
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def get(self, weight: Tensor, kind: str, make: Callable[[], Scaled]) -> Scaled:
        """Returns the cast of `kind`, made by `make` where it is not kept."""
        if self._kept is None:
            return make()
        key = id(weight), kind
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True)
class Fp8Context:
    """Settings that the fp8 layers of a model share."""

    config: PrecisionConfig
    layers: range
    """Numbers of the transformer layers whose GEMMs run in fp8."""

    casts: WeightCasts


def build_fp8(config: PrecisionConfig, num_layers: int, casts: WeightCasts) -> Fp8Context | None:
    """Builds the fp8 context of a configuration; None without fp8."""
    layers = config.fp8_layers(num_layers)
    return Fp8Context(config, layers, casts) if layers else None


def build_gemms(
    name: str, fp8: Fp8Context | None, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool
) -> LinearGemms:
    """Builds the GEMMs of the linear layer `name`: in fp8 with an fp8 context, else in the parameters' precision."""
    if fp8 is None:
        return PLAIN
    return RECIPES[fp8.config.fp8_recipe](name, fp8, tp, cuts, device, compiled)


class Fp8Gemms(nn.Module):
    """Base class of the recipes."""

    def __init__(self, name: str, fp8: Fp8Context, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> None:
        super().__init__()
        assert fp8.config.fp8_format is not None
        self.tp, self.cuts, self.casts, self.compiled = tp, cuts, fp8.casts, compiled
        self.grad_format = formats(fp8.config.fp8_format)[1]

    def cast_by_amax(self, x: Tensor, amax: Callable[[Tensor], Tensor], cut: bool, dtype: torch.dtype) -> Scaled:
        """Casts x [n, k] scaled by its own `amax`.

        The amax of a tensor that is cut over tensor-parallel ranks is reduced over them: each rank scales its part as
        one process scales the whole, so that layouts agree.
        """
        x = x.detach()  # else one more variant of each region would be compiled
        found = region(amax, self.compiled, static=True)(x)
        if cut:
            all_reduce_(found, self.tp, dist.ReduceOp.MAX)
        return region(cast_by_amax, self.compiled, static=True)(x, found, dtype)


INPUT, WEIGHT, GRAD = range(3)


class PerTensorGemms(Fp8Gemms):
    """One scale for each tensor. One cast serves all GEMMs of a tensor; those that sum over rows read its transpose.

    Inputs are gathered and saved for backward in fp8, one byte an element.
    """

    def cast(self, x: Tensor, which: int) -> Scaled:
        """Casts x [n, k]; `which` is INPUT, WEIGHT or GRAD."""
        raise NotImplementedError

    def cast_input(self, x: Tensor) -> Operand:
        values, scale = self.cast(rows_of(x), INPUT)
        return values.view(torch.uint8).view(x.shape), scale  # bytes, as not every backend sends fp8

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = weight.dtype
        y = scaled_mm(_operand(x, E4M3), self._weight(weight), dtype, bias, fast_accumulation=True)
        return y.view(*x[0].shape[:-1], -1)

    def cast_grad(self, dy: Tensor) -> Operand:
        values, scale = self.cast(rows_of(dy), GRAD)
        return values.view(torch.uint8).view(dy.shape), scale

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        columns = self.casts.get(weight, "columns", lambda: self._transposed(self._weight(weight)))
        dx = scaled_mm(_operand(dy, self.grad_format), columns, weight.dtype)
        return dx.view(*dy[0].shape[:-1], -1)

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand) -> None:
        rows, columns = self._transposed(_operand(dy, self.grad_format)), self._transposed(_operand(x, E4M3))
        out.add_(scaled_mm(rows, columns, out.dtype))

    def _transposed(self, x: Scaled) -> Scaled:
        values = region(transposed_bytes, self.compiled, static=True)(x.values.view(torch.uint8)).view(x.values.dtype)
        return Scaled(values, x.scale)

    def _weight(self, weight: Tensor) -> Scaled:
        return self.casts.get(weight, "rows", lambda: self.cast(matrix_of(weight.detach()), WEIGHT))


def _operand(parts: Operand, dtype: torch.dtype) -> Scaled:
    return Scaled(rows_of(parts[0]).view(dtype), parts[1])


class TensorwiseGemms(PerTensorGemms):
    """Scales each tensor by its own amax, which costs a pass over it before the cast."""

    def cast(self, x: Tensor, which: int) -> Scaled:
        cuts = self.cuts
        sequence = cuts.sequence or cuts.tokens
        cut = (sequence or cuts.inputs, cuts.inputs or cuts.outputs, cuts.outputs or cuts.tokens)[which]
        return self.cast_by_amax(x, amax_of, cut, self.grad_format if which == GRAD else E4M3)


class DelayedGemms(PerTensorGemms):
    """Scales each tensor by the amax history of earlier steps, so that a cast needs no pass over the tensor before it.

    In training each rank records its amax of this step. `DelayedScaling` reduces them over the ranks at the end of the
    step, and sets the multipliers of the next one.
    """

    def __init__(self, name: str, fp8: Fp8Context, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> None:
        super().__init__(name, fp8, tp, cuts, device, compiled)
        shape = (3, fp8.config.fp8_amax_history_len)
        history = nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
        history.meta = ParamMeta(f"{name}{AMAX_HISTORY}", shape, init=Init("zeros"))  # type: ignore[attr-defined]
        self.amax_history = history
        """[3, steps]: amax of input, weight and output gradient, the latest step first; 0 before the first step."""
        self.amax = torch.zeros(3, device=device)
        self.multiplier = torch.ones(3, device=device)

    def cast(self, x: Tensor, which: int) -> Scaled:
        dtype = self.grad_format if which == GRAD else E4M3
        cast = region(cast_by_multiplier, self.compiled, static=True)
        scaled, amax = cast(x.detach(), self.multiplier[which], dtype)
        if self.training:
            noted = self.amax[which]
            torch.maximum(noted, amax, out=noted)
        return scaled


AMAX_HISTORY = ".amax_history"
"""Suffix of the names of amax histories."""


class RowwiseGemms(Fp8Gemms):
    """One scale for each row of an operand, the dimension that a GEMM sums over. So each tensor is cast twice, by rows
    and by columns, and inputs are saved for backward uncast."""

    def cast_input(self, x: Tensor) -> Operand:
        return (x,)

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = self.casts.get(weight, "rows", lambda: self._rows(matrix_of(weight.detach()), self.cuts.inputs))
        y = scaled_mm(self._rows(rows_of(x[0]), self.cuts.inputs), rows, weight.dtype, bias, fast_accumulation=True)
        return y.view(*x[0].shape[:-1], -1)

    def cast_grad(self, dy: Tensor) -> Operand:
        return (dy,)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        columns = self.casts.get(
            weight, "columns", lambda: self._columns(matrix_of(weight.detach()), self.cuts.outputs)
        )
        dx = scaled_mm(self._rows(rows_of(dy[0]), self.cuts.outputs, self.grad_format), columns, weight.dtype)
        return dx.view(*dy[0].shape[:-1], -1)

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand) -> None:
        # The sum is over tokens. Every rank has all of them, but in front of a whole weight.
        cut = self.cuts.tokens
        rows, columns = self._columns(rows_of(dy[0]), cut, self.grad_format), self._columns(rows_of(x[0]), cut)
        out.add_(scaled_mm(rows, columns, out.dtype))

    def _rows(self, x: Tensor, cut: bool, dtype: torch.dtype = E4M3) -> Scaled:
        return self.cast_by_amax(x, amax_of_rows, cut, dtype)

    def _columns(self, x: Tensor, cut: bool, dtype: torch.dtype = E4M3) -> Scaled:
        """Casts the transpose of x [n, k]: [k, n], with a scale for each column of x."""
        return self._rows(x.t(), cut, dtype)


RECIPES: dict[str, type[TensorwiseGemms | DelayedGemms | RowwiseGemms]] = {
    "tensorwise": TensorwiseGemms,
    "delayed": DelayedGemms,
    "rowwise": RowwiseGemms,
}
