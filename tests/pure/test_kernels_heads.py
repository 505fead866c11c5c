"""Triton's cast of the gradient of attention's projection against its twin in torch, and what it is compiled to."""

from __future__ import annotations

import re
from itertools import product

import torch

from megatron.core.kernels import heads_cast as twins
from megatron.core.kernels.cast_transpose import CastOrder
from megatron.core.transformer.rotary import rotate_queries_and_keys
from tests.triton_cases import compiled, round_to_fp8_as_torch, run_apart, same_bits

WANTED = ((True, True), (True, False), (False, True))
FORMATS = torch.float8_e4m3fn, torch.float8_e5m2


def check_casts() -> None:
    """The twin casts what autograd makes in fp32 and rounds, and the kernel has the bits of the twin."""
    round_to_fp8_as_torch()
    twins._heads_cast.register_kernel("cpu", twins._heads_cast._init_fn)
    twins.region = lambda function, compiled, static: function
    generator = torch.Generator().manual_seed(2)
    shapes = (75, 2, 2, 3, 64, torch.bfloat16), (7, 1, 3, 1, 128, torch.float32)
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
        order = (torch.tensor(3.7), WANTED[number % 3], FORMATS[number % 2])
        expected, amax = twins.cast_transpose_with_amax_twin(joined, *order)
        for triton in (False, True):
            twins.runs_triton = lambda x, triton=triton: triton
            noted = torch.tensor(0.25)
            assert twins.casts_heads(grads, tables)
            found = twins.heads_gradient_cast(grads, tables, CastOrder(order[0], noted, *order[1:]))
            assert same_bits(noted, torch.maximum(torch.tensor(0.25), amax))
            for one, two in zip(found, expected, strict=True):
                assert (one is None) == (two is None) and (one is None or two is None or same_bits(one, two))
    assert not twins.casts_heads(grads, (angles[..., :1], angles[..., :1])), "a part of the channels is rotated"
    assert not twins.casts_heads((*grads, grads[0]), ()), "gates"


def test_interpreted_casts_are_those_of_what_autograd_makes() -> None:
    run_apart(check_casts, interpret=True)


def check_compiled() -> None:
    from triton import language as tl

    from megatron.core.kernels import heads_cast_triton as kernels

    types = {**dict.fromkeys(("dq", "dk", "dv", "cos", "sin"), "*bf16"), "multiplier": "*fp32", "part_amax": "*i32"}
    types |= dict.fromkeys(("n", "groups", "q_per_group"), "i32")
    for capability, name, dtype in (
        (80, "fp8e5", tl.float8e5),
        (90, "fp8e5", tl.float8e5),
        (90, "fp8e4nv", tl.float8e4nv),
    ):
        outputs = dict.fromkeys(("rows", "columns"), f"*{name}")
        constants = {"TURNS": True, "ROWS": True, "COLUMNS": True, "FORMAT": dtype, "LARGEST": 448.0, "HALF": 64}
        constants |= {"TILE_N": kernels.TILE_N}
        ptx = compiled(kernels.head_tiles, types | outputs, constants, capability, num_warps=kernels.WARPS).asm["ptx"]
        # A thread has 32 elements of each half, of cosines and of sines: four loads of 16 bytes of each.
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 16 and "st.global.b8" not in ptx
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 8


def test_casts_compile_to_wide_loads_and_stores() -> None:
    run_apart(check_compiled, interpret=False)
