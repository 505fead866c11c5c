"""Triton's casts of SwiGLU and of its gradient against their twins in torch, and what they are compiled to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extensions.fp8.casts import CastOrder, CastPair
from megatron.extensions.fusions.kernels import casts as twins
from tests.extensions.fusions.test_kernels_cast import FORMATS, WANTED, assert_cast, casts_of
from tests.triton_cases import compiled, round_to_fp8_as_torch, run_apart, run_on_cpu, same_bits


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


def cast(x: Tensor, grad: Tensor | None, order: CastOrder) -> CastPair:
    if grad is None:
        return twins.swiglu_cast(x, order, False)
    return twins.swiglu_gradient_cast(x, grad, order, False)


def check_casts(device: str = "cpu") -> None:
    """The twin is the cast of what autograd makes, and the kernel the twin, but where exponentials differ in the last
    bit: then some numbers are rounded to the next one in 16 bits, and few of those to the next one in 8. On a GPU the
    kernel alone runs."""
    interpreted = device == "cpu"
    if interpreted:
        round_to_fp8_as_torch()
        run_on_cpu(twins._swiglu)
    for (x, dy), dtype, wanted, backward in product(operands(), FORMATS, WANTED, (False, True)):
        grad = dy if backward else None
        own = x.to(device), None if grad is None else grad.to(device)
        for triton in (False, True) if interpreted else (True,):
            if interpreted:
                twins.runs_triton = lambda x, triton=triton: triton
            order = CastOrder(torch.tensor(3.7).to(device), torch.tensor(0.25).to(device), wanted, dtype)
            found, unnoted = cast(*own, order), cast(*own, order._replace(noted=None))
            assert_cast(found, plain(x, grad), order, 0.002 if interpreted else 0.01)
            assert all(two is None or same_bits(one.cpu(), two.cpu()) for one, two in zip(unnoted, found, strict=True))


def test_interpreted_casts_are_those_of_what_autograd_makes() -> None:
    run_apart(check_casts, interpret=True)


def check_compiled() -> None:
    from megatron.extensions.fusions.kernels import casts_triton as kernels

    tile = dict(zip(("TILE_N", "TILE_F"), kernels.SWIGLU_TILE, strict=True))
    for backward, name in product((False, True), ("fp8e4nv", "fp8e5")):
        types = {"x": "*bf16", "grad": "*bf16" if backward else None, "casts": casts_of(name), "n": "i32", "f": "i32"}
        ptx = compiled(kernels.swiglu_tiles, types, tile, 90, num_warps=kernels.WARPS).asm["ptx"]
        # A thread has 32 elements of each operand: four loads of 16 bytes, and two stores of each orientation.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == (12 if backward else 8)
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == (8 if backward else 4)
        assert "ld.global.b16" not in ptx and "st.global.b8" not in ptx


def test_casts_compile_to_wide_loads_and_stores() -> None:
    run_apart(check_compiled, interpret=False)
