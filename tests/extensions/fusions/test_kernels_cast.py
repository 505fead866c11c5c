"""Tests of Triton kernels that cast to fp8, including SwiGLU and its gradient. The kernels are compared bit for bit
with their plain-torch versions, and their compiled GPU code is checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extensions.speed.fp8 import casts as twins
from megatron.extensions.speed.fp8.casts import CastOrder, CastPair
from megatron.extensions.speed.fusions.kernels import casts as kernels_of
from tests.triton_cases import apart, compiled, round_to_fp8_as_torch, run_on_cpu, same_bits

FORMATS = torch.float8_e4m3fn, torch.float8_e5m2
WANTED = ((True, True), (True, False), (False, True))


def matrices() -> Iterator[Tensor]:
    """Yield matrices that contain numbers of many magnitudes, zeros, subnormal numbers and non-finite numbers. Some
    matrices are strided, some are empty, and some have sizes that are not multiples of a tile."""
    generator = torch.Generator().manual_seed(3)

    def spread(*shape: int) -> Tensor:
        numbers = (torch.randn(shape, generator=generator) for _ in range(2))
        return next(numbers) * torch.exp(4 * next(numbers))

    yield spread(130, 150).bfloat16()
    yield spread(33, 17)
    yield spread(40, 140).bfloat16().t()
    yield spread(30, 3, 50).half()[:, 1, ::2]
    yield torch.zeros(5, 7).bfloat16()
    odd = spread(20, 30).bfloat16()
    odd[0, :4] = torch.tensor([-0.0, 1e-40, -9.2e-41, 3e38])
    yield odd
    for bad in (torch.nan, torch.inf, -torch.inf):
        with_bad = odd.clone()
        with_bad[7, 11] = bad
        yield with_bad
    yield torch.empty(0, 24).bfloat16()


@pytest.mark.grid("stride", [5], [1])
@apart(interpret=True)
def test_interpreted_casts_match_their_twins(stride: int) -> None:
    """No other test runs these operators on CPU tensors. By default, every fifth case is tested. These cases cover each
    matrix, and each combination of a format and an orientation. With --whole, all cases are tested."""
    from megatron.extensions.speed.fusions.kernels import casts, casts_triton

    round_to_fp8_as_torch()
    casts.runs_triton = lambda x: True
    run_on_cpu(casts._by_amax, casts._noting_amax, casts._amax, casts._transposed)
    for x, dtype, wanted in list(product(matrices(), FORMATS, WANTED))[::stride]:
        check_operators(x, dtype, wanted)
    (state,) = casts_triton._states.values()
    assert not state.any(), "the last program resets the state for the next cast"


def check_operators(x: Tensor, dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    """Compare the operators on the device of x with their plain-torch versions on CPU."""
    case, own = (tuple(x.shape), x.dtype, dtype, wanted), x.cpu()
    by = twins.amax_of_rows_and_columns_twin(own, wanted)
    assert_same(twins.amax_of_rows_and_columns(x, wanted, True), by, case)
    whole = tuple(twins.amax_of(own) if wants else None for wants in wanted)
    for amax in (whole, by):
        given = (None if one is None else one.to(x.device) for one in amax)
        assert_same(twins.cast_transpose(x, *given, dtype, True), twins.cast_transpose_twin(own, *amax, dtype), case)
    for multiplier, before in ((3.7, 0.5), (0.01, 1e30), (1.0, torch.nan)):
        by_one, noted = torch.tensor(multiplier), torch.full((3,), before, device=x.device)
        order = CastOrder(by_one.to(x.device), noted[1], wanted, dtype)
        pair, largest = twins.cast_transpose_with_amax_twin(own, order._replace(multiplier=by_one))
        found = twins.cast_transpose_noting_amax(x, order, True)
        assert_same(found, pair, case)
        now = torch.maximum(torch.tensor(before), largest)
        assert same_bits(noted.cpu(), torch.stack([torch.tensor(before), now, torch.tensor(before)])), case
        if before == 0.5:
            assert_same(twins.cast_transpose_noting_amax(x, order._replace(noted=None), True), pair, case)
    values = own.to(dtype)
    assert same_bits(twins.transpose(values.to(x.device), True).cpu(), twins.transposed(values)), case


def assert_same(found: Iterable[Tensor | None], expected: Iterable[Tensor | None], case: object) -> None:
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None), case
        assert one is None or two is None or same_bits(one.cpu(), two), case


def assert_cast(pair: CastPair, of: Tensor, order: CastOrder, share: float = 0.004) -> None:
    """Assert that the fp8 cast `pair` equals the plain-torch cast of the tensor `of`. A fraction `share` of the
    elements may differ, because values next to a rounding tie may be rounded differently. Also assert that the recorded
    amax is the maximum of the amax of `of` and 0.25, the initial amax."""
    expected, amax = twins.cast_transpose_with_amax_twin(of, order._replace(multiplier=order.multiplier.cpu()))
    if order.noted is not None:
        largest = torch.maximum(torch.tensor(0.25), amax)
        torch.testing.assert_close(order.noted.cpu(), largest, rtol=2**-7, atol=0, equal_nan=True)
    for found, two in zip(pair, expected, strict=True):
        one = None if found is None else found.cpu()
        assert (one is None) == (two is None)
        if one is not None and two is not None and one.ndim == 2:
            assert one.shape == two.shape and one.is_contiguous()
            differ = one.float().nan_to_num(500.0) != two.float().nan_to_num(500.0)
            assert differ.sum() <= min(max(3, share * differ.numel()), 0.01 * differ.numel())
            torch.testing.assert_close(one.float(), two.float(), rtol=0.3, atol=1e-3, equal_nan=True)
        elif one is not None and two is not None:
            assert same_bits(one, two)


def casts_of(fp8: str) -> Any:
    """Return a `Casts` object that contains the Triton pointer type of each field, such as "*fp32", in place of the
    field's tensor."""
    from megatron.extensions.speed.fusions.kernels.casts_triton import Casts

    return Casts(f"*{fp8}", f"*{fp8}", "*fp32", "*fp32", "*i32", "*fp32")  # type: ignore[arg-type]


@apart(interpret=False)
def test_casts_compile_to_wide_loads_and_stores() -> None:
    from megatron.extensions.speed.fusions.kernels import casts_triton as kernels

    types = {"x": "*bf16", "strides": ("i32", 1), "row_bits": "*i32", "column_bits": "*i32", "n": "i32", "k": "i32"}
    types |= {"amax": ("*fp32", "*fp32"), "scales": ("*fp32", "*fp32")}
    tile = {"TILE": kernels.TILE}
    for capability, name in product((80, 90), ("fp8e4nv", "fp8e5")):
        if capability == 80 and name == "fp8e4nv":
            continue  # Triton and torch support fp8e4nv only on Ada and later GPUs
        outputs = {"rows": f"*{name}", "columns": f"*{name}", "casts": casts_of(name)}
        for by_amax, by_vector in ((False, False), (True, False), (True, True)):
            kernel = kernels.cast_tiles if by_amax else kernels.noting_tiles
            constants = tile | ({"BY_VECTOR": by_vector, "SMALLEST": 1e-30} if by_amax else {})
            ptx = compiled(kernel, types | outputs, constants, capability, num_warps=kernels.WARPS).asm["ptx"]
            # A thread processes 64 elements with eight loads of 16 bytes, and with four stores per orientation.
            # The number of loads depends on the version of Triton.
            loads, stores = (len(re.findall(rf"{kind}\.global\.v4\.b32", ptx)) for kind in ("ld", "st"))
            assert loads in ((8, 12) if by_vector else (8,)) and stores == 8
            assert "ld.global.b16" not in ptx and "st.global.b8" not in ptx
            if capability == 90:
                rounds = "e4m3" if name == "fp8e4nv" else "e5m2"
                assert f"cvt.rn.satfinite.{rounds}x2.f32" in ptx, "rounding is to nearest, with ties to even"
    bytes_ = {"x": "*u8", "out": "*u8"}
    for capability in (80, 90):
        assert compiled(kernels.amax_tiles, types, tile, capability, num_warps=kernels.WARPS).asm["cubin"]
        turned = compiled(kernels.transpose_tiles, types | bytes_, tile, capability, num_warps=kernels.WARPS)
        assert len(re.findall(r"(?:ld|st)\.global\.v4\.b32", turned.asm["ptx"])) == 8


def swiglu_operands() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield operands for SwiGLU. Some operands have sizes that are not multiples of a tile, some are empty, and some
    contain non-finite values."""
    generator = torch.Generator().manual_seed(5)
    for n, f, dtype in ((150, 70, torch.bfloat16), (33, 17, torch.float32), (0, 24, torch.bfloat16)):
        x, grad = (torch.randn(n, width, generator=generator) for width in (2 * f, f))
        yield (4 * x).to(dtype), grad.to(dtype)
    for bad in (torch.nan, torch.inf):
        x, grad = (torch.randn(20, width, generator=generator).bfloat16() for width in (60, 30))
        x[7, 11] = bad
        yield x, grad


def swiglu(x: Tensor, grad: Tensor | None) -> Tensor:
    """Return SwiGLU of x, or autograd's gradient of x if `grad` is given. The result is computed in fp32 and then
    rounded."""
    wide = x.float().clone().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    y = F.silu(gate) * up
    return (y if grad is None else torch.autograd.grad(y, wide, grad.float())[0]).detach().to(x.dtype)


def swiglu_cast(x: Tensor, grad: Tensor | None, order: CastOrder) -> CastPair:
    if grad is None:
        return kernels_of.swiglu_cast(x, order, False)
    return kernels_of.swiglu_gradient_cast(x, grad, order, False)


def check_swiglu(device: str = "cpu") -> None:
    """Compare the plain-torch kernel, which fuses SwiGLU with the cast to fp8, with a cast of the SwiGLU that autograd
    computes. Then compare the Triton kernel with the plain-torch version. Results may differ where exponentials differ
    in the last bit: some values are then rounded to the next 16-bit number, and a few of these to the next 8-bit
    number. On a GPU, only the Triton kernel is checked."""
    interpreted = device == "cpu"
    if interpreted:
        round_to_fp8_as_torch()
        run_on_cpu(kernels_of._swiglu)
    for (x, dy), dtype, wanted, backward in product(swiglu_operands(), FORMATS, WANTED, (False, True)):
        grad = dy if backward else None
        own = x.to(device), None if grad is None else grad.to(device)
        for triton in (False, True) if interpreted else (True,):
            if interpreted:
                kernels_of.runs_triton = lambda x, triton=triton: triton
            order = CastOrder(torch.tensor(3.7).to(device), torch.tensor(0.25).to(device), wanted, dtype)
            found, unnoted = swiglu_cast(*own, order), swiglu_cast(*own, order._replace(noted=None))
            assert_cast(found, swiglu(x, grad), order, 0.002 if interpreted else 0.01)
            assert all(two is None or same_bits(one.cpu(), two.cpu()) for one, two in zip(unnoted, found, strict=True))


@apart(interpret=True)
def test_interpreted_casts_of_swiglu_match_autograd() -> None:
    check_swiglu()


@apart(interpret=False)
def test_casts_of_swiglu_compile_to_wide_loads_and_stores() -> None:
    from megatron.extensions.speed.fusions.kernels import casts_triton as kernels

    tile = dict(zip(("TILE_N", "TILE_F"), kernels.SWIGLU_TILE, strict=True))
    for backward, name in product((False, True), ("fp8e4nv", "fp8e5")):
        types = {"x": "*bf16", "grad": "*bf16" if backward else None, "casts": casts_of(name), "n": "i32", "f": "i32"}
        ptx = compiled(kernels.swiglu_tiles, types, tile, 90, num_warps=kernels.WARPS).asm["ptx"]
        # A thread processes 32 elements of each operand with four loads of 16 bytes, and with two stores per
        # orientation.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == (12 if backward else 8)
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == (8 if backward else 4)
        assert "ld.global.b16" not in ptx and "st.global.b8" not in ptx
