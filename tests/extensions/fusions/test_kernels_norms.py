"""Tests of Triton kernels for norms with fused casts and sums, and for the gradient cast of the attention projection.
The kernels are compared with their plain-torch versions, and their compiled code is checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import compiled_regions
from megatron.core.transformer.rotary import rotate_queries_and_keys
from megatron.extensions.speed.fp8.casts import CastOrder, cast_transpose_with_amax_twin
from megatron.extensions.speed.fusions.kernels import casts as heads
from megatron.extensions.speed.fusions.kernels import norms as twins
from tests.extensions.fusions.test_kernels_cast import FORMATS, WANTED, assert_cast, casts_of
from tests.triton_cases import apart, compiled, round_to_fp8_as_torch, run_on_cpu, same_bits, stack_of

EPS = 1e-3


class Case(NamedTuple):
    x: Tensor
    update: Tensor | None
    of_total: Tensor | None
    of_normed: Tensor
    weight: Tensor
    bias: Tensor | None
    one_plus: bool


def cases() -> Iterator[Case]:
    """Yield cases whose rows and columns do not fill a tile. Some cases have rows that are too wide for one program,
    more rows than all programs process at a time, or non-finite values."""
    generator = torch.Generator().manual_seed(5)
    sizes = (5, 24, torch.bfloat16), (37, 600, torch.bfloat16), (70, 512, torch.float32), (6, 8200, torch.bfloat16)
    for (n, h, dtype), centered in product(sizes, (False, True)):
        x, update, of_total, of_normed = (torch.randn(n, h, generator=generator).to(dtype) for _ in range(4))
        weight, bias = (torch.randn(h, generator=generator).to(dtype) for _ in range(2))
        added = centered != (n == 5)
        parts = (update, of_total) if added else (None, None)
        yield Case(2 * x + 1, *parts, of_normed, weight, bias if centered else None, centered)
    bad = torch.randn(6, 24, generator=generator).bfloat16()
    bad[3, 5] = torch.inf
    yield Case(bad, bad, bad, bad, bad[0], bad[1], False)


def plain(case: Case) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the sum of x and the update, the normalized sum, and the gradients of the sum and the parameters. The
    normalized sum and the gradients are computed in fp32 by plain torch and autograd, and then rounded."""
    dtype = case.x.dtype
    total = case.x if case.update is None else case.x + case.update
    leaves = [part.float().clone().requires_grad_() for part in (total, case.weight, case.bias) if part is not None]
    wide, weight = leaves[0], leaves[1] + case.one_plus
    if case.bias is None:
        normed = F.rms_norm(wide, wide.shape[1:], weight, EPS)
    else:
        normed = F.layer_norm(wide, wide.shape[1:], weight, leaves[2], EPS)
    gradients = list(torch.autograd.grad(normed, leaves, case.of_normed.float()))
    if case.of_total is not None:
        gradients[0] = gradients[0] + case.of_total.float()
    return total, normed.detach().to(dtype), [gradient.to(dtype) for gradient in gradients]


def close(found: Tensor, expected: Tensor, steps: float = 1) -> None:
    """Assert that tensors are equal within one rounding step of the dtype of `found`, or within `steps` rounding steps
    for sums."""
    eps = torch.finfo(found.dtype).eps if found.dtype != torch.float32 else 1e-5
    scale = expected.float().nan_to_num().abs().max().item() if steps > 1 else 0.1
    expected = expected.float()
    torch.testing.assert_close(found.float(), expected, rtol=eps, atol=steps * eps * max(scale, 0.1), equal_nan=True)


def check_norms(device: str = "cpu") -> None:
    """Check that the plain-torch version and the kernel give the same results as autograd followed by a cast, up to the
    order of sums. On a GPU, only the Triton kernel is checked."""
    interpreted = device == "cpu"
    if interpreted:
        run_on_cpu(twins._norm_cast, twins._norm_gradients)
    for number, case in enumerate(cases()):
        total, normed, gradients = plain(case)
        dtype, wanted = FORMATS[number % 2], WANTED[number % 3]
        own = Case(*(part.to(device) if isinstance(part, Tensor) else part for part in case))

        def ordered(dtype: torch.dtype = dtype, wanted: tuple[bool, bool] = wanted) -> CastOrder:
            return CastOrder(torch.tensor(3.7).to(device), torch.tensor(0.25).to(device), wanted, dtype)

        for triton in (False, True) if interpreted else (True,):
            if interpreted:
                twins.runs_triton = lambda x, triton=triton: triton
            order = ordered()
            norm = twins.Norm(own.weight, own.bias, EPS, own.bias is not None, own.one_plus)
            found = twins.norm_cast(own.x, own.update, norm, order)
            assert same_bits(found.total.cpu(), total) and (own.update is None) == (found.total is own.x)
            assert_cast(found.pair, normed, order)
            for sums, casts in ((True, True), (True, False), (False, True)):
                order = ordered()
                operands = found.total, own.of_total, own.of_normed, own.weight, found.statistics, own.one_plus, sums
                of_total, of_parameters, row_sum, pair = twins.norm_gradients(*operands, order if casts else None)
                close(of_total.cpu(), gradients[0])
                for one, two in zip(of_parameters, gradients[1:], strict=True):
                    close(one.cpu(), two, steps=2)
                assert (row_sum is None) == (not sums) and (pair is None) == (not casts)
                if row_sum is not None:
                    close(row_sum.cpu(), of_total.cpu().float().sum(0).to(row_sum.dtype), steps=2)
                if pair is not None:
                    assert_cast(pair, gradients[0], order)


def check_heads(device: str = "cpu") -> None:
    """Compare the plain-torch version with autograd's fp32 result, rounded and cast to the output dtype. Then compare
    the Triton kernel with the plain-torch version bit for bit. On a GPU, only the Triton kernel is checked. A GPU fuses
    multiplications and additions, so numbers next to a rounding tie may differ."""
    interpreted = device == "cpu"
    if interpreted:
        run_on_cpu(heads._heads)
    generator = torch.Generator().manual_seed(2)
    shapes = (75, 2, 2, 3, 64, torch.bfloat16), (7, 1, 3, 1, 128, torch.bfloat16)
    for number, ((s, b, groups, q, d, dtype), turns) in enumerate(product(shapes, (True, False))):

        def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        grads = made(s, b, groups * q, d), made(s, b, groups, d), made(s, b, groups, d)
        angles = made(s, 1 if number else b, 1, d // 2)
        tables = (angles.cos(), angles.sin()) if turns else ()
        q_and_k = [torch.zeros_like(grad, dtype=torch.float32, requires_grad=True) for grad in grads[:2]]
        turned = rotate_queries_and_keys(*q_and_k, *tables) if turns else q_and_k
        back = torch.autograd.grad(turned, q_and_k, [grad.float() for grad in grads[:2]])
        parts = [part.to(dtype).unflatten(2, (groups, -1)) for part in (*back, grads[2])]
        joined = torch.cat(parts, dim=3).flatten(0, 1).flatten(1)
        grads, tables = (tuple(part.to(device) for part in parts) for parts in (grads, tables))
        on_host = CastOrder(torch.tensor(3.7), torch.tensor(0.25), WANTED[number % 3], FORMATS[number % 2])
        expected, amax = cast_transpose_with_amax_twin(joined, on_host)
        for triton in (False, True) if interpreted else (True,):
            if interpreted:
                heads.runs_triton = lambda x, triton=triton: triton
            order = CastOrder(*(part.to(device).clone() for part in on_host[:2]), *on_host[2:])
            assert heads.casts_heads(grads, tables)
            found = heads.heads_gradient_cast(grads, tables, order)
            if not interpreted:
                assert_cast(found, joined, order)
                continue
            assert same_bits(order.noted, torch.maximum(torch.tensor(0.25), amax))
            for one, two in zip(found, expected, strict=True):
                assert (one is None) == (two is None) and (one is None or two is None or same_bits(one, two))
    assert not heads.casts_heads(grads, (angles[..., :1], angles[..., :1])), "only some of the channels are rotated"
    assert not heads.casts_heads((*grads, grads[0]), ()), "gates"
    wide = tuple(grad.float() for grad in grads)
    assert heads.casts_heads(wide, ()) != heads.runs_triton(wide[0])


@apart(interpret=True)
def test_interpreted_kernels_match_autograd() -> None:
    round_to_fp8_as_torch()
    compiled_regions._compiled = lambda function, static: function
    check_norms()
    check_heads()


class Backward(NamedTuple):
    h: int
    centered: bool
    sums: bool


FEW = 16
"""Number of bytes that a thread may spill from registers to local memory. Spilling this many bytes costs one or two
loads."""

NAMED = Backward(4096, False, False), Backward(8192, False, False), Backward(12288, centered=True, sums=True)
"""Norm sizes of Llama 8B, Llama 70B and GPT-3. Only GPT-3's norms have biases."""

CAPABILITIES = (80, "fp8e5"), (90, "fp8e4nv")


def norm_types(fp8: str, centered: bool) -> dict[str, Any]:
    from megatron.extensions.speed.fusions.kernels.norms_triton import Backward as Given

    types: dict[str, Any] = dict.fromkeys(("x", "update", "weight", "total", "dx", "out"), "*bf16")
    types |= dict.fromkeys(("inverse", "part_sums", "parts"), "*fp32")
    mean = "*fp32" if centered else None
    types |= {"eps": "fp32", "bias": "*bf16" if centered else None, "mean": mean}
    types |= {"casts": casts_of(fp8), "given": Given(*["*bf16"] * 4, "*fp32", mean)}  # type: ignore
    return types | dict.fromkeys(("n", "h", "steps", "count", "width"), "i32")


def compiled_forward(h: int, centered: bool, capability: int, fp8: str) -> Any:
    from megatron.extensions.speed.fusions.kernels import norms_triton as kernels

    constants = {"ONE_PLUS": False, "TILE": kernels.tile_of(h)}
    return compiled(kernels.norm_cast_rows, norm_types(fp8, centered), constants, capability, num_warps=kernels.WARPS)


def compiled_backward(case: Backward, capability: int, fp8: str, columns: bool = True) -> Any:
    from megatron.extensions.speed.fusions.kernels import norms_triton as kernels

    tile = kernels.gradient_tile(case.h)
    types, constants = norm_types(fp8, case.centered), {"ONE_PLUS": False, "SUMS": case.sums, "TILE": tile}
    if not columns:
        types["casts"] = types["casts"]._replace(columns=None)
    return compiled(kernels.norm_gradient_chunks, types, constants, capability, num_warps=kernels.WARPS)


@apart(interpret=False)
def test_norms_compile_to_wide_loads_and_stores() -> None:
    from megatron.extensions.speed.fusions.kernels import norms_triton as kernels

    for capability, fp8 in CAPABILITIES:
        forward = compiled_forward(4096, capability == 80, capability, fp8)
        backward = compiled_backward(NAMED[0], capability, fp8)
        assert compiled_backward(NAMED[0], capability, fp8, columns=False).asm["cubin"]
        # A thread loads 64 elements of each operand, or 16 in a backward pass, 8 elements at a time. A chunked kernel
        # reads gamma for each row. A chunked kernel also reads all other operands twice, except the gradient of the
        # residual sum.
        for built, expected in ((forward, 16), (backward, 14)):
            loads = len(re.findall(r"ld\.global\.v4\.b32", built.asm["ptx"]))
            assert expected <= loads <= expected + 4, loads
            assert "st.global.b8" not in built.asm["ptx"] and "ld.global.b16" not in built.asm["ptx"]
        parts = {"SUMMED": kernels.SUMMED, "PARTS": kernels.SUMMED_PARTS}
        assert compiled(kernels.add_parts, norm_types(fp8, False), parts, capability).asm["cubin"]


@apart(interpret=False)
def test_casts_of_heads_compile_to_wide_loads_and_stores() -> None:
    from megatron.extensions.speed.fusions.kernels import casts_triton as kernels

    types: dict[str, Any] = dict.fromkeys(("dq", "dk", "dv", "cos", "sin"), "*bf16")
    types |= dict.fromkeys(("n", "groups", "q_per_group"), "i32")
    constants = {"HALF": 64, "TILE_N": kernels.TILE}
    for capability, name in ((80, "fp8e5"), (90, "fp8e5"), (90, "fp8e4nv")):
        given = types | {"casts": casts_of(name)}
        ptx = compiled(kernels.head_tiles, given, constants, capability, num_warps=kernels.WARPS).asm["ptx"]
        # A thread loads four groups of 32 elements: both halves, the cosines and the sines. Each group is loaded with
        # four instructions of 16 bytes.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 16 and "st.global.b8" not in ptx
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 8


@pytest.mark.skipif("stack_tool() is None", reason="Triton has no cuobjdump, which reports spilled registers")
@pytest.mark.parametrize(("capability", "fp8"), CAPABILITIES)
@apart(interpret=False)
def test_norms_of_named_models_keep_their_operands_in_registers(capability: int, fp8: str) -> None:
    spilled = {}
    for case in NAMED:
        spilled[case] = stack_of(compiled_backward(case, capability, fp8))
        spilled[case.h] = stack_of(compiled_forward(case.h, case.centered, capability, fp8))
    assert max(spilled.values()) <= FEW, spilled
