"""Triton's casts of SwiGLU and of its gradient against their twins in torch, and what they are compiled to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extensions.fp8 import cast_transpose
from megatron.extensions.fusions.kernels import swiglu_cast as twins
from tests.triton_cases import compiled, round_to_fp8_as_torch, run_apart, same_bits

FORMATS = torch.float8_e4m3fn, torch.float8_e5m2
WANTED = ((True, True), (True, False), (False, True))


def operands() -> Iterator[tuple[Tensor, Tensor]]:
    """Of sizes that are no multiples of a tile, empty, and with values that are not finite."""
    generator = torch.Generator().manual_seed(5)
    for n, f, dtype in ((150, 70, torch.bfloat16), (33, 17, torch.float32), (0, 24, torch.bfloat16)):
        x, grad = (torch.randn(n, width, generator=generator) for width in (2 * f, f))
        yield (4 * x).to(dtype), grad.to(dtype)
    for bad in (torch.nan, torch.inf):
        x, grad = (torch.randn(20, width, generator=generator).bfloat16() for width in (60, 30))
        x[7, 11] = bad
        yield x, grad


def plain(x: Tensor, grad: Tensor | None) -> Tensor:
    """SwiGLU, or the gradient of x by autograd, in fp32 and rounded."""
    wide = x.float().clone().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    y = F.silu(gate) * up
    return (y if grad is None else torch.autograd.grad(y, wide, grad.float())[0]).detach().to(x.dtype)


def cast(x: Tensor, grad: Tensor | None, noted: Tensor | None, wanted: tuple[bool, bool], dtype: torch.dtype):  # type: ignore[no-untyped-def]
    multiplier = torch.tensor(3.7).to(x.device)
    if grad is None:
        return twins.swiglu_cast(x, multiplier, noted, wanted, dtype, False)
    return twins.swiglu_gradient_cast(x, grad, multiplier, noted, wanted, dtype, False)


def check_casts(device: str = "cpu") -> None:
    """The twin is the cast of what autograd makes, and the kernel the twin, but where exponentials differ in the last
    bit: then some numbers are rounded to the next one in 16 bits, and few of those to the next one in 8. On a GPU the
    kernel alone runs."""
    interpreted = device == "cpu"
    if interpreted:
        round_to_fp8_as_torch()
        for operator in (twins._forward, twins._backward):
            operator.register_kernel("cpu", operator._init_fn)
    for (x, dy), dtype, wanted, backward in product(operands(), FORMATS, WANTED, (False, True)):
        grad, case = dy if backward else None, (tuple(x.shape), x.dtype, dtype, wanted, backward)
        expected, amax = cast_transpose.cast_transpose_with_amax_twin(plain(x, grad), torch.tensor(3.7), wanted, dtype)
        own = x.to(device), None if grad is None else grad.to(device)
        for triton in (False, True) if interpreted else (True,):
            if interpreted:
                twins.runs_triton = lambda x, triton=triton: triton
            noted = torch.tensor(0.25).to(device)
            found = [None if one is None else one.cpu() for one in cast(*own, noted, wanted, dtype)]
            largest = torch.maximum(torch.tensor(0.25), amax)
            torch.testing.assert_close(noted.cpu(), largest, rtol=2**-7, atol=0, equal_nan=True)
            for one, two in zip(found, expected, strict=True):
                assert (one is None) == (two is None), case
                if one is not None and one.ndim == 2:
                    assert one.shape == two.shape and one.is_contiguous(), case
                    differ = one.float().nan_to_num(500.0) != two.float().nan_to_num(500.0)
                    assert differ.float().mean().nan_to_num() <= (0.002 if interpreted else 0.01), case
                    torch.testing.assert_close(one.float(), two.float(), rtol=0.3, atol=1e-3, equal_nan=True)
                elif one is not None:
                    assert same_bits(one, two), case
            unnoted = cast(*own, None, wanted, dtype)
            assert all(one is None or same_bits(one.cpu(), two) for one, two in zip(unnoted, found, strict=True)), case


def test_interpreted_casts_are_those_of_what_autograd_makes() -> None:
    run_apart(check_casts, interpret=True)


def check_compiled() -> None:
    from triton import language as tl

    from megatron.extensions.fusions.kernels import swiglu_cast_triton as kernels

    types = {"x": "*bf16", "grad": "*bf16", "multiplier": "*fp32", "state": "*i32", "n": "i32", "f": "i32"}
    types |= {"scale": "*fp32", "noted": "*fp32"}
    for backward, (name, dtype) in product((False, True), (("fp8e4nv", tl.float8e4nv), ("fp8e5", tl.float8e5))):
        constants = {
            "NOTES": True,
            "BACKWARD": backward,
            "ROWS": True,
            "COLUMNS": True,
            "FORMAT": dtype,
            "LARGEST": 448.0,
        }
        constants |= {"TILE_N": kernels.TILE_N, "TILE_F": kernels.TILE_F}
        outputs = dict.fromkeys(("rows", "columns"), f"*{name}")
        ptx = compiled(kernels.swiglu_tiles, types | outputs, constants, 90, num_warps=kernels.WARPS).asm["ptx"]
        # A thread has 32 elements of each operand: four loads of 16 bytes, and two stores of each orientation.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == (12 if backward else 8)
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == (8 if backward else 4)
        assert "ld.global.b16" not in ptx and "st.global.b8" not in ptx


def test_casts_compile_to_wide_loads_and_stores() -> None:
    run_apart(check_compiled, interpret=False)
