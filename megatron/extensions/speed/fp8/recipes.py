"""fp8 recipes for the GEMMs of a linear layer: tensorwise, delayed and rowwise scaling (arXiv 2209.05433). The delayed
recipe computes multipliers from the amax history of earlier steps (section 3, and NVIDIA's Transformer Engine).

Each linear layer has a separate recipe object. Weights are cast once for all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.collectives import all_reduce_
from megatron.core.compiled_regions import region
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import HISTORY, Init, ParamMeta
from megatron.core.tensor_parallel.linear_gemms import (
    Cuts,
    GradCasts,
    Operand,
    Operands,
    WeightCasts,
    matrix_of,
    residual_gemm,
    rows_of,
)
from megatron.extensions.speed.fp8 import casts
from megatron.extensions.speed.fp8.casts import (
    E4M3,
    CastOrder,
    CastPair,
    Scaled,
    amax_of,
    amax_of_rows_and_columns,
    cast_transpose,
    cast_transpose_noting_amax,
    formats,
    multiplier_of,
    scaled_mm,
    transpose,
)
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.initialize import Runtime


@dataclass
class GatheredWeight:
    """Weight that is cast by rows and all-gathered over the data-parallel ranks (`weight_gather.py`)."""

    values: Tensor
    """e4m3 values [out, in]: a view of the all-gather's output buffer."""

    amax: Tensor
    """Largest absolute value of each block, fp32 [row blocks, column blocks]."""

    valid: bool = False
    """True if the cast of the weight is up to date. This field is False before the first optimizer update, because each
    rank casts the initial weights itself instead of gathering them."""


@dataclass(frozen=True)
class Fp8Context:
    """Settings shared by the fp8 layers of a model."""

    config: Fp8Flags
    layers: range
    """Indices of the transformer layers whose GEMMs run in fp8."""

    casts: WeightCasts


INPUT, WEIGHT, GRAD = range(3)


class Wanted(NamedTuple):
    """Requested casts of a tensor [n, k]: whether to cast by rows [n, k], and whether to cast by columns [k, n]."""

    rows: bool = True
    columns: bool = False


ROWS = Wanted()
COLUMNS = Wanted(False, True)
BOTH = Wanted(True, True)


class Fp8Gemms(nn.Module):
    """Base class of the fp8 recipes. Recipes differ in how they compute scales.

    A tensor is cast once for all GEMMs that read it: by rows for GEMMs that sum over the columns of the tensor, and by
    columns for GEMMs that sum over its rows. Inputs are saved for the backward pass as casts by columns, with one byte
    per element. With sequence parallelism, each rank instead saves its shard of the input in the form that it sends to
    other ranks (`cast_to_gather`). The backward pass gathers the input again, and then casts it by columns.
    """

    adds_residual = False
    """True if `forward` accepts an addend, which cuBLASLt supports only if each operand has a single scale."""

    splits_tokens = False
    """True if parts of a sequence can be gathered and multiplied separately (see `LinearGemms`)."""

    gathers_weights = False
    """True if weights can be gathered in fp8, because both casts of a weight have the same scales and values."""

    def __init__(self, name: str, fp8: Fp8Context, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> None:
        super().__init__()
        assert fp8.config.fp8_format is not None
        self.tp = tp
        self.cuts = cuts
        self.casts = fp8.casts
        self.compiled = compiled
        self.grad_format = formats(fp8.config.fp8_format)[1]

    @property
    def grad_casts(self) -> GradCasts | None:
        return None

    def format_of(self, which: int) -> torch.dtype:
        """Return the fp8 dtype for tensors of the kind `which`: INPUT, WEIGHT or GRAD."""
        return self.grad_format if which == GRAD else E4M3

    def cast(self, x: Tensor, which: int, wanted: Wanted) -> list[Scaled]:
        """Cast x [n, k], an INPUT, WEIGHT or GRAD, as `wanted` requests; the cast by rows comes first."""
        raise NotImplementedError

    def cast_to_gather(self, x: Tensor) -> Operand:
        """Return the tensor that ranks gather for an input [s/t, b, in]: its cast, or the input itself if the recipe
        casts after the gather."""
        raise NotImplementedError

    def cast_gathered(self, x: Operand, wanted: Wanted) -> Scaled:
        """Return the cast, by rows or by columns, of a gathered x in the form that `cast_to_gather` returns."""
        raise NotImplementedError

    def cast_input(self, x: Tensor, needs_dw: bool) -> Operands:
        if self.cuts.sequence:
            local = self.cast_to_gather(x)
            return Operands(local, local)
        return self._operands(x, INPUT, needs_dw)

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
        rows = self.cast_gathered(x, ROWS) if self.cuts.sequence else _by_rows(x)
        by, shape = self._weight(weight, "rows"), x[0].shape[:-1]
        if addend is None:
            return scaled_mm(rows, by, weight.dtype, bias, fast_accumulation=True).view(*shape, -1)
        sums = residual_gemm(rows.values, by.values, rows_of(addend), bias, (rows.scale, by.scale))
        return sums.view(*shape, -1)

    def cast_grad(self, dy: Tensor, needs_dw: bool) -> Operands:
        return self._operands(dy, GRAD, needs_dw)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        dx = scaled_mm(_by_rows(dy), self._weight(weight, "columns"), weight.dtype)
        return dx.view(*dy[0].shape[:-1], -1)

    def add_weight_grad_(self, out: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        columns = self.cast_gathered(x, COLUMNS) if self.cuts.sequence else Scaled(*x)
        casts.add_fp8_product_(out, Scaled(*dy), columns, overwrite)

    def _operands(self, x: Tensor, which: int, needs_dw: bool) -> Operands:
        return _as_operands(self.cast(rows_of(x), which, BOTH if needs_dw else ROWS), x.shape[:-1])

    def _weight(self, weight: Tensor, kind: str) -> Scaled:
        """Return the weight, cast by "rows" or "columns". If casts are kept for the backward pass, both are computed
        together."""

        def make() -> Scaled:
            if self.training and self.casts.keeps:
                rows, columns = self._cast_weight(weight, BOTH)
                self.casts.keep(weight, rows=rows, columns=columns)
                return rows if kind == "rows" else columns
            return self._cast_weight(weight, ROWS if kind == "rows" else COLUMNS)[0]

        return self.casts.get(weight, kind, make)

    def _cast_weight(self, weight: Tensor, wanted: Wanted) -> list[Scaled]:
        gathered: GatheredWeight | None = getattr(weight, "gathered_in_fp8", None)
        if gathered is None or not gathered.valid:
            return self.cast(matrix_of(weight), WEIGHT, wanted)
        rows = Scaled(gathered.values, self.scale_of_weight(gathered.amax))
        if not wanted.columns:
            return [rows]
        values, scale = transpose(rows.values, self.compiled), rows.scale
        columns = Scaled(values, scale if scale.ndim == 0 else scale.t())
        return [rows, columns] if wanted.rows else [columns]

    def weight_multiplier(self, amax: Tensor) -> Tensor:
        """Return the multiplier of each block of a weight from the block's `amax`; valid only if `gathers_weights`."""
        return multiplier_of(amax, torch.finfo(E4M3).max)

    def scale_of_weight(self, amax: Tensor) -> Tensor:
        """Return the scale that `cast` uses for a weight with this `amax`."""
        return self.weight_multiplier(amax).reciprocal()

    def _amax_over_ranks(self, amax: Tensor | None, cut: bool) -> None:
        """Reduce, in place, the amax of a tensor that is sharded over tensor-parallel ranks. All ranks then use the
        scale of the whole tensor, so that results agree between layouts."""
        if amax is not None and cut:
            all_reduce_(amax, self.tp, dist.ReduceOp.MAX)


def _as_operands(made: list[Scaled], tokens: tuple[int, ...]) -> Operands:
    """Convert casts of an activation [*tokens, n] to `Operands`: by rows, and optionally by columns."""
    rows, *columns = made
    return Operands((rows.values.view(*tokens, -1), rows.scale), tuple(columns[0]) if columns else ())


def given_operands(pair: CastPair, tokens: tuple[int, ...]) -> Operands:
    """Convert a fused kernel's casts of x [*tokens, n] to the form that `cast_input` and `cast_grad` return."""
    return _as_operands(_scaled(pair, Wanted(pair.rows is not None, pair.columns is not None)), tokens)


def _by_rows(x: Operand) -> Scaled:
    return Scaled(rows_of(x[0]), x[1])


def _scaled(pair: CastPair, wanted: Wanted) -> list[Scaled]:
    made = (Scaled(pair.rows, pair.row_scale), Scaled(pair.columns, pair.column_scale))  # type: ignore[arg-type]
    return [scaled for scaled, wants in zip(made, wanted, strict=True) if wants]


class PerTensorGemms(Fp8Gemms):
    """Recipe with one scale per tensor. The cast by columns is therefore the transpose of the cast by rows. Ranks cast
    layer inputs before they gather them."""

    adds_residual = gathers_weights = splits_tokens = True

    def cast_to_gather(self, x: Tensor) -> Operand:
        values, scale = self.cast(rows_of(x), INPUT, ROWS)[0]
        # the all-gather transfers uint8, because some communication backends do not support fp8
        return values.view(torch.uint8).view(x.shape), scale

    def cast_gathered(self, x: Operand, wanted: Wanted) -> Scaled:
        values = rows_of(x[0]).view(E4M3)
        if wanted.columns:
            values = transpose(values, self.compiled)
        return Scaled(values, x[1])

    def forward_rows_(self, out: Tensor, x: Operand, weight: Tensor, bias: Tensor | None) -> None:
        """Write x Wᵀ + bias to `out`. `x` contains inputs [n, in] in fp8. Gathered inputs are viewed as uint8."""
        rows, by = Scaled(x[0].view(E4M3), x[1]), self._weight(weight, "rows")
        scaled_mm(rows, by, weight.dtype, bias, fast_accumulation=True, out=out)

    def cast_grad_to_gather(self, dy: Tensor) -> Operand:
        values, scale = self._cast_part_of_grad(rows_of(dy))
        return values.view(torch.uint8).view(dy.shape), scale

    def _cast_part_of_grad(self, dy: Tensor) -> Scaled:
        """Cast dY [n, out], the output gradients of some tokens, by rows. The scale is computed from all tokens."""
        return self.cast(dy, GRAD, ROWS)[0]

    def input_grad_rows_(self, out: Tensor, dy: Operand, weight: Tensor) -> None:
        """Write dY W to `out`. `dy` contains gradients [n, out] in fp8. Gathered gradients are viewed as uint8."""
        rows = Scaled(dy[0].view(self.grad_format), dy[1])
        scaled_mm(rows, self._weight(weight, "columns"), weight.dtype, out=out)

    def gathered_grad(self, dy: Operand) -> Operand:
        return transpose(rows_of(dy[0]).view(self.grad_format), self.compiled), dy[1]


class TensorwiseGemms(PerTensorGemms):
    """Tensorwise recipe: scale each tensor by its amax, which requires one more pass over the tensor."""

    def cast(self, x: Tensor, which: int, wanted: Wanted) -> list[Scaled]:
        x = x.detach()  # without autograd, so that regions are compiled only once
        amax, cuts = region(amax_of, self.compiled, static=True)(x), self.cuts
        sequence = cuts.sequence or cuts.tokens
        cut = (sequence or cuts.inputs, cuts.inputs or cuts.outputs, cuts.outputs or cuts.tokens)[which]
        self._amax_over_ranks(amax, cut)
        by_rows, by_columns = (amax if wants else None for wants in wanted)
        return _scaled(cast_transpose(x, by_rows, by_columns, self.format_of(which), self.compiled), wanted)

    def _cast_part_of_grad(self, dy: Tensor) -> Scaled:
        dy = dy.detach()
        amax = region(amax_of, self.compiled, static=True)(dy)
        self._amax_over_ranks(amax, True)
        return Scaled(*_scaled(cast_transpose(dy, amax, None, self.format_of(GRAD), self.compiled), ROWS)[0])

    def scale_of_weight(self, amax: Tensor) -> Tensor:
        return super().scale_of_weight(amax).view(())


class DelayedGemms(PerTensorGemms):
    """Delayed recipe: scale each tensor by the amax history of earlier steps, so that a cast needs no preceding pass
    over the tensor.

    In training, each rank records the amax that it observes in the current step. At the end of the step,
    `DelayedScaling` reduces the recorded values over the ranks, and sets the multipliers of the next step.
    """

    def __init__(self, name: str, fp8: Fp8Context, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool) -> None:
        super().__init__(name, fp8, tp, cuts, device, compiled)
        shape = (3, fp8.config.fp8_amax_history_len)
        history = nn.Parameter(torch.zeros(shape, device=device), requires_grad=False)
        history.meta = ParamMeta(f"{name}{AMAX_HISTORY}", shape, init=Init("zeros"), role="state")  # type: ignore[attr-defined]
        self.amax_history = history
        """Amax history [3, steps] of the input, the weight and the output gradient, with the latest step first. All
        values are 0 before the first step."""
        self.amax = torch.zeros(3, device=device)
        self.multiplier = torch.ones(3, device=device)
        self._no_value: Tensor | None = None

    @property
    def grad_casts(self) -> GradCasts:
        return self

    def cast(self, x: Tensor, which: int, wanted: Wanted) -> list[Scaled]:
        return _scaled(cast_transpose_noting_amax(x.detach(), self._order(which, wanted), self.compiled), wanted)

    def input_order(self, needs_dw: bool) -> CastOrder:
        """Return which casts of its input this layer needs, as a request to the kernel that computes the input."""
        return self._order(INPUT, BOTH if needs_dw and not self.cuts.sequence else ROWS)

    def given_input(self, pair: CastPair, tokens: tuple[int, ...]) -> Operands:
        """Convert casts of an input [*tokens, in], which a fused kernel computed for `input_order`, to the form that
        `cast_input` returns."""
        if not self.cuts.sequence:
            return given_operands(pair, tokens)
        assert pair.rows is not None and pair.row_scale is not None
        local = pair.rows.view(torch.uint8).view(*tokens, -1), pair.row_scale  # the form that `cast_to_gather` returns
        return Operands(local, local)

    def grad_order(self, needs_dw: bool) -> CastOrder:
        """Return which casts of dY this layer needs, as a request to the kernel that computes dY."""
        return self._order(GRAD, BOTH if needs_dw else ROWS)

    def given_grad(self, pair: CastPair, tokens: tuple[int, ...]) -> Operands:
        """Convert casts of an output gradient from a fused kernel to the form that `cast_grad` returns."""
        return given_operands(pair, tokens)

    def no_value(self, dtype: torch.dtype) -> Tensor:
        """Return a NaN scalar, whose expanded views replace tensors that exist only as fp8 casts."""
        if self._no_value is None or self._no_value.dtype != dtype:
            self._no_value = torch.full((), torch.nan, dtype=dtype, device=self.multiplier.device)
        return self._no_value

    def _order(self, which: int, wanted: Wanted) -> CastOrder:
        noted = self.amax[which] if self.training else None
        return CastOrder(self.multiplier[which], noted, wanted, self.format_of(which))

    def weight_multiplier(self, amax: Tensor) -> Tensor:
        return self.multiplier[WEIGHT].view(1, 1)

    def scale_of_weight(self, amax: Tensor) -> Tensor:
        amax = amax.view(())
        if self.training:
            noted = self.amax[WEIGHT]
            torch.maximum(noted, amax, out=noted)
        return self.multiplier[WEIGHT].reciprocal() + 0.0 * amax  # the scale is NaN if the amax is not finite


AMAX_HISTORY = f".amax{HISTORY}"
"""Suffix of the parameter names of amax histories."""


class RowwiseGemms(Fp8Gemms):
    """Rowwise recipe. A cast by rows has one scale for each row of the tensor, and a cast by columns has one scale for
    each column. Inputs are gathered before they are cast."""

    def cast(self, x: Tensor, which: int, wanted: Wanted) -> list[Scaled]:
        x, cuts = x.detach(), self.cuts
        by_rows, by_columns = amax_of_rows_and_columns(x, wanted, self.compiled)
        # A cast by columns needs the amax over all tokens. Each rank holds all tokens unless `cuts.tokens` is True.
        self._amax_over_ranks(by_rows, (cuts.inputs, cuts.inputs, cuts.outputs)[which])
        self._amax_over_ranks(by_columns, (cuts.tokens, cuts.outputs, cuts.tokens)[which])
        return _scaled(cast_transpose(x, by_rows, by_columns, self.format_of(which), self.compiled), wanted)

    def cast_to_gather(self, x: Tensor) -> Operand:
        return (x,)

    def cast_gathered(self, x: Operand, wanted: Wanted) -> Scaled:
        return self.cast(rows_of(x[0]), INPUT, wanted)[0]


class DelayedScaling(Meter):
    """Amax histories of all fp8 layers on a rank, and the multipliers computed from these histories.

    All ranks of a pipeline stage hold the same amax histories. During a step, a rank records only the amax of its own
    shard of each tensor. At the end of a step, an all-reduce computes the maximum of the ranks' amax values. Histories
    are part of the model's state and of checkpoints.
    """

    def __init__(self, config: Fp8Flags, modules: Iterable[nn.Module], stage: Axis) -> None:
        found = (part for module in modules for part in module.modules())
        self.layers = [part for part in found if isinstance(part, DelayedGemms)]
        self.stage = stage
        self.margin = config.fp8_margin
        self.takes_max = config.fp8_amax_compute_algo == "max"
        if not self.layers:
            return
        self.history = torch.stack([layer.amax_history.data for layer in self.layers])
        """Amax histories of all fp8 layers, [layers, 3, steps]."""
        self.amax = torch.stack([layer.amax for layer in self.layers])
        self.multiplier = torch.stack([layer.multiplier for layer in self.layers])
        for row, layer in enumerate(self.layers):
            layer.amax_history.data, layer.amax = self.history[row], self.amax[row]
            layer.multiplier = self.multiplier[row]
        grad_format = formats(config.fp8_format or "")[1]
        largest = [torch.finfo(each).max for each in (E4M3, E4M3, grad_format)]
        self.largest = torch.tensor(largest, device=self.history.device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the multipliers from the histories, for example after loading a checkpoint."""
        if self.layers:
            amax = self.history.amax(dim=-1) if self.takes_max else self.history[..., 0]
            self.multiplier.copy_(multiplier_of(amax, self.largest, self.margin))

    @torch.no_grad()
    def end_step(self, skip: Tensor) -> None:
        """Add this step's amax values to the histories, unless the step was skipped (`skip` is 1).

        A history does not change if the new value is not finite. Collective over the pipeline stage: one reduction of 3
        numbers per layer.
        """
        if not self.layers:
            return
        amax = all_reduce_(self.amax.nan_to_num_(nan=torch.inf), self.stage, dist.ReduceOp.MAX).unsqueeze(-1)
        moved = torch.cat((amax, self.history[..., :-1]), dim=-1)
        self.history.copy_(torch.where((skip > 0) | amax.isinf(), self.history, moved))
        self.amax.zero_()
        self.refresh()

    def step_state(self) -> list[Tensor]:
        return [self.history, self.amax, self.multiplier] if self.layers else []

    def discard_step(self) -> None:
        """Discard the amax values recorded in a step that was aborted before `end_step`."""
        if self.layers:
            self.amax.zero_()


class Fp8Scales(Callback):
    """Callback that owns the `DelayedScaling` of a run. After a checkpoint is loaded, this callback computes the
    multipliers from the loaded histories."""

    def on_model(self, config: RunConfig, stages: Mapping[int, GPTModel], runtime: Runtime) -> None:
        self.scaling = DelayedScaling(config.options(Fp8Flags), stages.values(), runtime.state.axis("stage"))

    def meters(self, run: Any) -> Sequence[Meter]:
        self.scaling.refresh()
        return [self.scaling]
