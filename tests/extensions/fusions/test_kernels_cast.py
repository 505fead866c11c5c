"""Triton's casts to fp8 against their twins in torch, bit for bit, and what they are compiled to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.extensions.fp8 import cast_transpose as twins
from tests.triton_cases import compiled, round_to_fp8_as_torch, run_apart, same_bits

FORMATS = torch.float8_e4m3fn, torch.float8_e5m2
WANTED = ((True, True), (True, False), (False, True))


def matrices() -> Iterator[Tensor]:
    """Of sizes that are no multiples of a tile, strided, empty, and with everything that a number may be."""
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


def check_casts(stride: int = 1) -> None:
    """Through the operators, run on CPU tensors for this once. Every one of `stride` cases."""
    from megatron.extensions.fusions.kernels import cast_transpose, cast_transpose_triton

    round_to_fp8_as_torch()
    cast_transpose.runs_triton = lambda x: True
    for operator in (
        cast_transpose._by_amax,
        cast_transpose._noting_amax,
        cast_transpose._amax,
        cast_transpose._transposed,
    ):
        operator.register_kernel("cpu", operator._init_fn)
    for x, dtype, wanted in list(product(matrices(), FORMATS, WANTED))[::stride]:
        check_operators(x, dtype, wanted)
    (state,) = cast_transpose_triton._states.values()
    assert not state.any(), "the last program leaves it as the first of the next cast needs it"


def check_operators(x: Tensor, dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    """The operators against the twins, on the device of x. Twins run on CPU."""
    case, own = (tuple(x.shape), x.dtype, dtype, wanted), x.cpu()
    by = twins.amax_of_rows_and_columns_twin(own, wanted)
    assert_same(twins.amax_of_rows_and_columns(x, wanted, True), by, case)
    whole = tuple(twins.amax_of(own) if wants else None for wants in wanted)
    for amax in (whole, by):
        given = (None if one is None else one.to(x.device) for one in amax)
        assert_same(twins.cast_transpose(x, *given, dtype, True), twins.cast_transpose_twin(own, *amax, dtype), case)
    for multiplier, before in ((3.7, 0.5), (0.01, 1e30), (1.0, torch.nan)):
        by_one, noted = torch.tensor(multiplier), torch.full((3,), before, device=x.device)
        pair, largest = twins.cast_transpose_with_amax_twin(own, by_one, wanted, dtype)
        found = twins.cast_transpose_noting_amax(x, by_one.to(x.device), noted[1], wanted, dtype, True)
        assert_same(found, pair, case)
        now = torch.maximum(torch.tensor(before), largest)
        assert same_bits(noted.cpu(), torch.stack([torch.tensor(before), now, torch.tensor(before)])), case
        if before == 0.5:
            unnoted = twins.cast_transpose_noting_amax(x, by_one.to(x.device), None, wanted, dtype, True)
            assert_same(unnoted, pair, case)
    values = own.to(dtype)
    assert same_bits(twins.transpose(values.to(x.device), True).cpu(), twins.transposed(values)), case


def assert_same(found: Iterable[Tensor | None], expected: Iterable[Tensor | None], case: object) -> None:
    for one, two in zip(found, expected, strict=True):
        assert (one is None) == (two is None), case
        assert one is None or two is None or same_bits(one.cpu(), two), case


def check_a_fifth_of_the_casts() -> None:
    """Each matrix, and each format in each orientation."""
    check_casts(5)


@pytest.mark.grid("cases", ["a fifth"], ["all"])
def test_interpreted_casts_are_the_twins(cases: str) -> None:
    run_apart(check_casts if cases == "all" else check_a_fifth_of_the_casts, interpret=True)


def check_compiled() -> None:
    from triton import language as tl

    from megatron.extensions.fusions.kernels import cast_transpose_triton as kernels

    types = dict.fromkeys(("given_rows", "given_columns", "row_scale", "column_scale", "noted"), "*fp32")
    types |= {"x": "*bf16", "state": "*i32", "row_bits": "*i32", "column_bits": "*i32"}
    types |= dict.fromkeys(("n", "k", "x_stride_n"), "i32")
    both = {"ROWS": True, "COLUMNS": True, "TILE": kernels.TILE, "x_stride_k": 1}
    for capability, (name, dtype) in product((80, 90), (("fp8e4nv", tl.float8e4nv), ("fp8e5", tl.float8e5))):
        if capability == 80 and dtype == tl.float8e4nv:
            continue  # Triton has this format from Ada on, as torch has GEMMs of it
        outputs = dict.fromkeys(("rows", "columns"), f"*{name}")
        for by_amax, by_vector in ((False, False), (True, False), (True, True)):
            constants = {
                "NOTES": not by_amax,
                "BY_AMAX": by_amax,
                "BY_VECTOR": by_vector,
                "FORMAT": dtype,
                "LARGEST": 448.0,
                "SMALLEST": 1e-30,
            }
            built = compiled(kernels.cast_tiles, types | outputs, both | constants, capability, num_warps=kernels.WARPS)
            ptx = built.asm["ptx"]
            # A thread has 64 elements: eight loads of 16 bytes, and four stores of each orientation. Versions of Triton
            # differ in how they load vectors.
            loads, stores = (len(re.findall(rf"{kind}\.global\.v4\.b32", ptx)) for kind in ("ld", "st"))
            assert loads in ((8, 12) if by_vector else (8,)) and stores == 8
            assert "ld.global.b16" not in ptx and "st.global.b8" not in ptx
            if capability == 90:
                rounds = "e4m3" if dtype == tl.float8e4nv else "e5m2"
                assert f"cvt.rn.satfinite.{rounds}x2.f32" in ptx, "to nearest, ties to even"
    bytes_ = {"x": "*u8", "out": "*u8"}
    for capability in (80, 90):
        assert compiled(kernels.amax_tiles, types, both, capability, num_warps=kernels.WARPS).asm["cubin"]
        alone = {"TILE": kernels.TILE, "x_stride_k": 1}
        turned = compiled(kernels.transpose_tiles, types | bytes_, alone, capability, num_warps=kernels.WARPS).asm[
            "ptx"
        ]
        assert len(re.findall(r"(?:ld|st)\.global\.v4\.b32", turned)) == 8


def test_casts_compile_to_wide_loads_and_stores() -> None:
    run_apart(check_compiled, interpret=False)
