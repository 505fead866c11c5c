"""Tests of casts to fp8 and of fp8 GEMMs. The errors of casts are compared with the exact error bounds of the fp8
formats. Every fp8 GEMM is compared with a GEMM of the dequantized operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core import torch_private
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import LOCAL, LinearFunction
from megatron.core.tensor_parallel.linear_formats import build_format
from megatron.core.tensor_parallel.linear_gemms import Cuts, WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.extensions.speed.fp8 import blockwise
from megatron.extensions.speed.fp8 import casts as fp8
from megatron.extensions.speed.fp8.build import RECIPES, Fp8Format
from megatron.extensions.speed.fp8.casts import (
    E4M3,
    E5M2,
    CastOrder,
    Scaled,
    amax_of,
    cast_transpose,
    cast_transpose_noting_amax,
    multiplier_of,
)
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8.recipes import BOTH, ROWS, DelayedScaling
from megatron.training.config.run_config import LoggingConfig
from megatron.training.metrics.summary import peak_tflops

CPU = torch.device("cpu")
MANTISSA = {E4M3: 3, E5M2: 2}
SPACING = {E4M3: 2.0**-9, E5M2: 2.0**-16}
"""Distance between the smallest representable numbers of each fp8 format."""
FORMATS = [E4M3, E5M2]


def spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random values that span many orders of magnitude."""
    return (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(dtype)


def by_amax(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Scaled:
    pair = cast_transpose(x, amax, None, dtype, False)
    assert pair.rows is not None and pair.row_scale is not None
    return Scaled(pair.rows, pair.row_scale)


def by_multiplier(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> tuple[Scaled, Tensor]:
    """Cast x, but not its transpose, with the given multiplier. Return the result of the cast and the amax that the
    cast recorded."""
    noted = torch.zeros(())
    pair = cast_transpose_noting_amax(x, CastOrder(multiplier, noted, ROWS, dtype), False)
    assert pair.rows is not None and pair.row_scale is not None
    return Scaled(pair.rows, pair.row_scale), noted


def casts(x: Tensor, dtype: torch.dtype) -> Iterator[Scaled]:
    amax = amax_of(x)
    yield by_amax(x, amax, dtype)
    yield by_multiplier(x, multiplier_of(amax, torch.finfo(dtype).max, margin=2), dtype)[0]
    yield by_rows(x, dtype)


def by_rows(x: Tensor, dtype: torch.dtype) -> Scaled:
    return by_amax(x, x.abs().amax(1, keepdim=True).float(), dtype)


def by_columns(x: Tensor, dtype: torch.dtype) -> Scaled:
    return by_rows(x.t().contiguous(), dtype)


def in_blocks(x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Cast x [n, k] to fp8 in blocks of `rows` x 128 elements, each scaled by a power of two. Return the dequantized
    values in fp64."""
    found = torch.empty(x.shape, dtype=torch.float64)
    for out_rows, x_rows in zip(found.split(rows), x.float().split(rows), strict=True):
        for out, block in zip(out_rows.split(128, dim=1), x_rows.split(128, dim=1), strict=True):
            room, exponent = torch.finfo(dtype).max / block.abs().max().item(), -130
            while 2.0 ** (exponent + 1) <= room:
                exponent += 1
            out.copy_((block * 2.0**exponent).to(dtype).double() / 2.0**exponent)
    return found


def fp64(scaled: Scaled) -> Tensor:
    return scaled.dequantized(torch.float64)


class Exact:
    """Product a bᵀ + bias [n, m], computed in fp64 for a [n, k] and b [m, k], with an error bound for fp32 sums in any
    order."""

    def __init__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        added = torch.zeros(b.shape[0], dtype=torch.float64) if bias is None else bias.double()
        self.values = a @ b.t() + added
        # Each term is rounded once, and there are four more roundings for the scales, their product and the bias. Each
        # error is at most 2^-24 of the sum of the terms' absolute values (Higham, Accuracy and Stability of Numerical
        # Algorithms,
        # section 3.1).
        self.room = (a.shape[1] + 4) * 2.0**-24 * (a.abs() @ b.abs().t() + added.abs())

    def is_near(self, found: Tensor) -> bool:
        """Return True if `found` is within the error bound of a product that is summed in fp32 and rounded once to the
        dtype of `found`."""
        rounding = 2.0**-8 * (self.values.abs() + self.room) if found.dtype == torch.bfloat16 else 0.0
        return bool(((found.double() - self.values).abs() <= self.room + rounding).all())


@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_round_to_nearest(dtype: torch.dtype) -> None:
    x = spread(48, 64)
    for scaled in casts(x, dtype):
        error = (fp64(scaled) - x.double()).abs()
        relative, absolute = 2.0 ** -(MANTISSA[dtype] + 1), SPACING[dtype] / 2 * scaled.scale.double()
        assert (error <= torch.maximum(relative * x.double().abs(), absolute) * (1 + 2**-20)).all()
        assert scaled.values.float().abs().max() <= torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_value_is_cast_to_the_largest_fp8_number(dtype: torch.dtype) -> None:
    x = spread(48, 64)
    whole, with_margin, rows = casts(x, dtype)
    assert whole.values.float().abs().max() == torch.finfo(dtype).max
    assert with_margin.values.float().abs().max() == torch.finfo(dtype).max / 4
    assert rows.values.float().abs().amax(1).eq(torch.finfo(dtype).max).all()
    assert rows.scale.shape == (48, 1) and by_rows(x.t(), dtype).values.is_contiguous()


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_beyond_their_amax_history_saturate(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -3.0, 1e30, -1e30]])
    scaled, amax = by_multiplier(x, multiplier_of(torch.tensor(2.0), torch.finfo(dtype).max), dtype)
    assert amax == x.abs().max()
    assert torch.allclose(fp64(scaled), torch.tensor([[1.0, -2.0, 2.0, -2.0]], dtype=torch.float64), rtol=1e-6)


def test_multipliers_of_extreme_amax_values() -> None:
    amax = torch.tensor([0.0, 1e-44, 2.0, 3e38, torch.inf, torch.nan])
    found = multiplier_of(amax, 448.0)
    assert found[:4].tolist() == [1.0, 448.0 * 2.0**100, 224.0, pytest.approx(448 / 3e38)]
    assert found[4] == 0 and found[5].isnan()
    zeros = by_amax(torch.zeros(16, 16), torch.tensor(0.0), E4M3)
    assert zeros.scale == 1 and not zeros.values.float().any()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_reach_the_product(bad: float, dtype: torch.dtype) -> None:
    x, w = spread(16, 32), spread(16, 32)
    x[3, 4] = bad
    for scaled, weight in zip(casts(x, dtype), casts(w, E4M3), strict=True):
        y = fp8.scaled_mm(scaled, weight, torch.bfloat16)
        assert y[3].isnan().all()
        assert not y.isfinite().any() if scaled.scale.ndim == 0 else y[4:].isfinite().all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_a_gemm_equals_that_of_the_dequantized_operands(dtype: torch.dtype, out: torch.dtype) -> None:
    x, w, bias = spread(48, 64), spread(32, 64), spread(32)
    for a, b in zip(casts(x, dtype), casts(w, E4M3), strict=True):
        added = bias if out == torch.bfloat16 else None  # the CUDA kernel supports a bias only with 16-bit results
        exact = Exact(fp64(a), fp64(b), added)
        for y in (fp8.scaled_mm(a, b, out, added), fp8.dequantized_mm(a, b, out, added)):
            assert y.dtype == out
            assert exact.is_near(y)


def test_cpus_multiply_dequantized_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own fp8 kernel is never called on a CPU, because not every CPU supports it. The test replaces the fp8
    kernel of GPUs with an emulation, and checks that the emulated kernel and the CPU implementation give the same
    result."""
    x, w = spread(48, 64), spread(32, 64)
    asked = []

    def noted(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, **_: Any) -> Tensor:
        asked.append((a, b))
        return ((a.double() * scale_a.double()) @ (b.double() * scale_b.double())).to(out_dtype)

    monkeypatch.setattr(torch_private, "scaled_mm", noted)
    pairs = list(zip(casts(x, E4M3), casts(w, E4M3), strict=True))
    found = [fp8.scaled_mm(a, b, torch.float32) for a, b in pairs]
    assert all(Exact(fp64(a), fp64(b)).is_near(each) for (a, b), each in zip(pairs, found, strict=True))
    assert not asked
    monkeypatch.setattr(fp8, "multiplies_in_fp8", lambda x: True)
    a, b = next(pair for pair in pairs if pair[0].scale.ndim == 0)
    assert Exact(fp64(a), fp64(b)).is_near(fp8.scaled_mm(a, b, torch.float32))
    assert len(asked) == 1


@dataclass
class Layer:
    """Linear layer with a gradient buffer and with the operands of one step."""

    recipe: str
    hybrid: bool = True

    def __post_init__(self) -> None:
        config = Fp8Flags(fp8_format="hybrid" if self.hybrid else "e4m3", fp8_recipe=self.recipe)
        self.context = Fp8Format(config, range(1), WeightCasts())
        self.gemms = self.context.linear("linear", Axis(), Cuts(), CPU, False)
        # the sizes give full and partial tiles
        s, out, features = (72, 40, 208) if self.recipe == "blockwise" else (24, 8, 64)
        # the weight has two output dims, as the weights of query-key-value layers do
        self.weight = nn.Parameter(spread(4, out, features))
        self.weight.main_grad = torch.zeros(4, out, features)  # type: ignore[attr-defined]
        self.x, self.dy = spread(s, 2, features).requires_grad_(), spread(s, 2, 4 * out)

    def backward(self) -> tuple[Tensor, Tensor]:
        """Run a forward and a backward pass, and return the output y and the input gradient dX. The weight gradient is
        added to main_grad."""
        self.x.grad = None
        y = LinearFunction.apply(self.x, self.weight, None, LOCAL, Axis(), WeightGradQueue(), self.gemms)
        y.backward(self.dy)
        assert self.x.grad is not None
        return y.detach(), self.x.grad

    def exact(self) -> dict[str, Exact]:
        """Cast the layer's operands to fp8, and return the exact products of the cast operands, keyed by GEMM."""
        x, w, dy = self.x.detach().flatten(0, 1), self.weight.detach().flatten(0, 1), self.dy.flatten(0, 1)
        grad = E5M2 if self.hybrid else E4M3
        if self.recipe == "rowwise":
            y = Exact(fp64(by_rows(x, E4M3)), fp64(by_rows(w, E4M3)))
            dx = Exact(fp64(by_rows(dy, grad)), fp64(by_columns(w, E4M3)))
            dw = Exact(fp64(by_columns(dy, grad)), fp64(by_columns(x, E4M3)))
            return {"y": y, "dx": dx, "dw": dw}
        if self.recipe == "blockwise":
            y = Exact(in_blocks(x, 1, E4M3), in_blocks(w, 128, E4M3))
            dx = Exact(in_blocks(dy, 1, grad), in_blocks(w, 128, E4M3).t())
            twice = in_blocks(in_blocks(x, 1, E4M3).t(), 1, E4M3)
            return {"y": y, "dx": dx, "dw": Exact(in_blocks(dy.t(), 1, grad), twice)}
        cast = {"tensorwise": lambda x, dtype: by_amax(x, amax_of(x), dtype)}.get(
            self.recipe, lambda x, dtype: by_multiplier(x, torch.tensor(1.0), dtype)[0]
        )
        x, w, dy = fp64(cast(x, E4M3)), fp64(cast(w, E4M3)), fp64(cast(dy, grad))
        return {"y": Exact(x, w), "dx": Exact(dy, w.t()), "dw": Exact(dy.t(), x.t())}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hybrid", [True, False])
def test_the_three_gemms_of_a_layer_are_exact(recipe: str, hybrid: bool) -> None:
    layer = Layer(recipe, hybrid)
    y, dx = layer.backward()
    found = {"y": y.flatten(0, 1), "dx": dx.flatten(0, 1), "dw": layer.weight.main_grad.flatten(0, 1)}
    for name, exact in layer.exact().items():
        assert found[name].dtype == (torch.float32 if name == "dw" else torch.bfloat16)
        assert exact.is_near(found[name]), name
    once = layer.weight.main_grad.clone()
    layer.backward()
    assert torch.equal(layer.weight.main_grad, 2 * once), "weight gradients accumulate"


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_cast_once_while_they_are_kept(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = Layer(recipe), []
    cast = layer.gemms.cast

    def counted(x: Tensor, *args: Any) -> Any:
        seen.append(x.shape == layer.weight.flatten(0, 1).shape)
        return cast(x, *args)

    monkeypatch.setattr(layer.gemms, "cast", counted)
    with layer.context.casts.kept():
        first = layer.backward()
        second = layer.backward()
    assert sum(seen) == 1, "by rows and by columns at once"
    assert all(map(torch.equal, first, second))
    layer.weight.data.mul_(2)
    with layer.context.casts.kept():
        assert not torch.equal(layer.backward()[0], first[0]), "the next step has different weights"
    assert sum(seen) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_inputs_are_saved_in_one_byte_by_columns(recipe: str) -> None:
    output, saved = Layer(recipe).gemms.cast_input(spread(24, 2, 64), True)
    assert [(x.shape, x.element_size()) for x in (output[0], saved[0])] == [((24, 2, 64), 1), ((64, 48), 1)]
    assert Layer(recipe).gemms.cast_input(spread(24, 2, 64), False).weight_grad == ()


@pytest.mark.parametrize(("recipe", "size"), [("tensorwise", 1), ("delayed", 1), ("rowwise", 2), ("blockwise", 1)])
def test_inputs_are_gathered_in_one_byte_except_by_rows(recipe: str, size: int) -> None:
    context = Fp8Format(Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe), range(1), WeightCasts())
    gemms = context.linear("linear", Axis(), Cuts(sequence=True, outputs=True), CPU, False)
    output, saved = gemms.cast_input(spread(24, 2, 64), True)
    assert output is saved and output[0].shape == (24, 2, 64) and output[0].element_size() == size


def test_an_outlier_costs_precision_only_in_its_tile() -> None:
    x = torch.randn(128, 384).bfloat16()
    x[5, 140] = 2.0**18  # all small values in the tile of this outlier become 0
    error = (fp64(blockwise.cast_by_blocks(x, 1, E4M3)) - x.double()).abs() / x.double().abs().clamp(min=0.05)
    assert (error[5, 128:256] == 1).sum() > 64
    error[5, 128:256] = 0
    assert error.max() < 2.0**-4
    x[:, 130] = torch.nan
    bad = fp64(blockwise.cast_by_blocks(x, 128, E4M3)).isnan()
    assert bad[:, 128:256].all() and bad.sum() == 128 * 128


def delayed(**options: Any) -> tuple[Layer, DelayedScaling]:
    layer = Layer("delayed")
    config = Fp8Flags(fp8_format="hybrid", **options)
    layer.gemms = Fp8Format(config, range(1), WeightCasts()).linear("linear", Axis(), Cuts(), CPU, False)
    return layer, DelayedScaling(config, [layer.gemms], Axis())


GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


def test_delayed_scaling_follows_the_previous_steps() -> None:
    layer, scaling = delayed(fp8_amax_history_len=3, fp8_amax_compute_algo="max", fp8_margin=1)
    expected = torch.zeros(3, 3)
    largest = torch.tensor([448.0, 448.0, 57344.0])
    for factor in (8.0, 1.0, 2.0, 0.5, 0.25):
        values = [layer.x.detach() * factor, layer.weight.detach(), layer.dy * factor]
        used = torch.where(expected.amax(1) > 0, largest / 2 / expected.amax(1), 1.0)
        assert torch.equal(layer.gemms.multiplier, used)
        for which, value in enumerate(values):
            for part in value.flatten(0, -2).split(12):  # micro-batches
                layer.gemms.cast(part, which, ROWS)
        scaling.end_step(GO)
        amax = torch.stack([value.abs().max().float() for value in values])
        expected = torch.cat((amax[:, None], expected[:, :-1]), dim=1)
        assert torch.equal(layer.gemms.amax_history, expected)
    recent, scaling = delayed(fp8_amax_history_len=3)
    recent.gemms.amax_history.copy_(expected)
    scaling.refresh()
    assert torch.equal(recent.gemms.multiplier, largest / expected[:, 0])


def test_delayed_scaling_ignores_skipped_values() -> None:
    layer, scaling = delayed()
    layer.backward()
    scaling.end_step(GO)
    before = layer.gemms.amax_history.clone()
    assert (before > 0).all()
    layer.x.data.mul_(2)
    layer.backward()
    scaling.end_step(SKIP)
    layer.backward()
    scaling.discard_step()
    layer.gemms.eval()
    layer.backward()
    assert torch.equal(layer.gemms.amax_history, before) and not scaling.amax.any()
    layer.gemms.train()
    layer.x.data[0, 0, 0] = torch.nan
    layer.backward()
    scaling.end_step(GO)
    assert torch.equal(layer.gemms.amax_history[0], before[0]), "of the inputs; the weight's has moved on"
    assert layer.gemms.multiplier.isfinite().all()


@pytest.mark.grid("recipe", ("delayed", "blockwise"), list(RECIPES))
def test_compiled_casts_are_the_same(recipe: str) -> None:
    x = spread(256, 128) if recipe == "blockwise" else spread(48, 64)
    found = {}
    for compiled in (False, True):
        layer = Layer(recipe)
        layer.gemms.compiled = compiled
        found[compiled] = [part.float() for cast in layer.gemms.cast(x, 2, BOTH) for part in cast]
    assert len(found[True]) == 4 and all(map(torch.equal, found[True], found[False]))


def test_some_layers_stay_in_bf16() -> None:
    def layers(**options: Any) -> list[int]:
        return list(Fp8Flags(**options).layers(6))

    assert layers() == []
    assert layers(fp8_format="hybrid") == [0, 1, 2, 3, 4, 5]
    assert layers(fp8_format="hybrid", first_last_layers_bf16=True) == [1, 2, 3, 4]
    ends = {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3}
    assert layers(fp8_format="hybrid", first_last_layers_bf16=True, **ends) == [0, 1, 2]
    assert build_format(ModelParallelConfig(), 6, 0, WeightCasts()) is None


def test_gpus_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    config = ModelParallelConfig(bf16=True, extension_options=(Fp8Flags(fp8_format="hybrid"),))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"--fp8-format hybrid needs .* capability 8\.9 .* has 8\.0: remove it"):
        Fp8Format.check(config, gpu)
    Fp8Format.check(config, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Fp8Format.check(config, gpu)
    tiles = ModelParallelConfig(bf16=True, extension_options=(Fp8Flags(fp8_format="e4m3", fp8_recipe="blockwise"),))
    for cuda, capability, text in (("12.8", (9, 0), "torch has CUDA 12.8"), ("13.0", (10, 0), "has 10.0 and torch")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.raises(ValueError, match=f"--fp8-recipe blockwise needs .* {text}.*: use --fp8-recipe tensorwise"):
            Fp8Format.check(tiles, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Fp8Format.check(tiles, gpu)


def test_utilisation_is_of_the_fp8_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda", 0)
    peaks = [peak_tflops(LoggingConfig(), gpu, torch.bfloat16, linear) for linear in (None, "fp8")]
    assert peaks == [989.4, 1978.9]
    assert peak_tflops(LoggingConfig(peak_tflops=5.0), gpu, torch.bfloat16, "fp8") == 5.0
