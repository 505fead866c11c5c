"""The matrix products of a linear layer in fp8 (arXiv 2209.05433), by three scaling recipes.

There is one object for each layer. Weights are cast once for all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
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
from megatron.core.regions import region
from megatron.core.tensor_parallel.linear_gemms import PLAIN, Cuts, LinearGemms, Operand, matrix_of, rows_of


class WeightCasts:
    """fp8 copies of weights: made once inside of `kept`, where weights do not change, else at every use."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], Scaled] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Weights do not change in here."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def get(self, weight: Tensor, kind: str, make: Callable[[], Scaled]) -> Scaled:
        """The copy of `kind`, if need be by `make`."""
        if self._kept is None:
            return make()
        key = id(weight), kind
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass(frozen=True)
class Fp8Context:
    """What the fp8 layers of a model have in common."""

    config: PrecisionConfig
    layers: range
    """The transformer layers that multiply in fp8, by number."""

    casts: WeightCasts


def build_fp8(config: PrecisionConfig, num_layers: int, casts: WeightCasts) -> Fp8Context | None:
    """What a configuration asks for; None where nothing is in fp8."""
    layers = config.fp8_layers(num_layers)
    return Fp8Context(config, layers, casts) if layers else None


def build_gemms(
    name: str, fp8: Fp8Context | None, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool
) -> LinearGemms:
    """Those of the linear layer `name`: in fp8 if there is a context for that."""
    if fp8 is None:
        return PLAIN
    return RECIPES[fp8.config.fp8_recipe](name, fp8, tp, cuts, device, compiled)


class Fp8Gemms(nn.Module):
    """What the recipes have in common."""

    def __init__(self, name: str, fp8: Fp8Context, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> None:
        super().__init__()
        assert fp8.config.fp8_format is not None
        self.tp, self.cuts, self.casts, self.compiled = tp, cuts, fp8.casts, compiled
        self.grad_format = formats(fp8.config.fp8_format)[1]

    def cast_by_amax(self, x: Tensor, amax: Callable[[Tensor], Tensor], cut: bool, dtype: torch.dtype) -> Scaled:
        """x [n, k] scaled by what `amax` says of it. If it is cut, of the whole that x is a part of: every rank scales
        its part as one process scales the whole, and layouts agree."""
        found = region(amax, self.compiled)(x)
        if cut:
            all_reduce_(found, self.tp, dist.ReduceOp.MAX)
        return region(cast_by_amax, self.compiled)(x, found, dtype)


INPUT, WEIGHT, GRAD = range(3)


class PerTensorGemms(Fp8Gemms):
    """A scale for each tensor: what is cast serves all products, transposed where these sum over rows.

    Inputs are gathered and kept in fp8, one byte an element.
    """

    def cast(self, x: Tensor, which: int) -> Scaled:
        """x [n, k], which is an input, a weight or a gradient."""
        raise AssertionError("a recipe says how")

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
        values = region(transposed_bytes, self.compiled)(x.values.view(torch.uint8)).view(x.values.dtype)
        return Scaled(values, x.scale)

    def _weight(self, weight: Tensor) -> Scaled:
        return self.casts.get(weight, "rows", lambda: self.cast(matrix_of(weight.detach()), WEIGHT))


def _operand(parts: Operand, dtype: torch.dtype) -> Scaled:
    return Scaled(rows_of(parts[0]).view(dtype), parts[1])


class TensorwiseGemms(PerTensorGemms):
    """Each tensor is scaled by its own largest value, which costs a look at it before the cast."""

    def cast(self, x: Tensor, which: int) -> Scaled:
        cuts = self.cuts
        cut = (cuts.sequence or cuts.inputs, cuts.inputs or cuts.outputs, cuts.outputs)[which]
        return self.cast_by_amax(x, amax_of, cut, self.grad_format if which == GRAD else E4M3)


class DelayedGemms(PerTensorGemms):
    """Each tensor is scaled by the largest values of the steps before, so that nothing is waited for.

    Largest values of this step are noted in training, on each rank for itself; `DelayedScaling` brings ranks together
    when the step ends, and sets the multipliers of the next one.
    """

    def __init__(self, name: str, fp8: Fp8Context, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> None:
        super().__init__(name, fp8, tp, cuts, device, compiled)
        shape = (3, fp8.config.fp8_amax_history_len)
        history = nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
        history.meta = ParamMeta(f"{name}{AMAX_HISTORY}", shape, init=Init("zeros"))  # type: ignore[attr-defined]
        self.amax_history = history
        """[3, steps]: of inputs, weights and gradients, the latest step first; 0 for none."""
        self.amax = torch.zeros(3, device=device)
        self.multiplier = torch.ones(3, device=device)

    def cast(self, x: Tensor, which: int) -> Scaled:
        dtype = self.grad_format if which == GRAD else E4M3
        scaled, amax = region(cast_by_multiplier, self.compiled)(x, self.multiplier[which], dtype)
        if self.training:
            noted = self.amax[which]
            torch.maximum(noted, amax, out=noted)
        return scaled


AMAX_HISTORY = ".amax_history"
"""What names of such states end in."""


class RowwiseGemms(Fp8Gemms):
    """A scale for each row of each operand, along which a product sums; so each tensor is cast twice, by rows and by
    columns, and inputs are kept as they come."""

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
        # Tokens, which this sums over, are on every rank.
        rows, columns = self._columns(rows_of(dy[0]), False, self.grad_format), self._columns(rows_of(x[0]), False)
        out.add_(scaled_mm(rows, columns, out.dtype))

    def _rows(self, x: Tensor, cut: bool, dtype: torch.dtype = E4M3) -> Scaled:
        return self.cast_by_amax(x, amax_of_rows, cut, dtype)

    def _columns(self, x: Tensor, cut: bool, dtype: torch.dtype = E4M3) -> Scaled:
        """The transpose of x [n, k], as [k, n] with a scale for each column of x."""
        return self._rows(x.t(), cut, dtype)


RECIPES: dict[str, type[TensorwiseGemms | DelayedGemms | RowwiseGemms]] = {
    "tensorwise": TensorwiseGemms,
    "delayed": DelayedGemms,
    "rowwise": RowwiseGemms,
}
