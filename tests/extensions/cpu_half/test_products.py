"""Test that 16-bit matrix products are computed in fp32 on CPUs without 16-bit instructions. The results match torch's
16-bit products within one rounding, and all ranks use the same method."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.extensions.speed.cpu_half import products as cpu_half
from tests.harness import run_world, train_to_the_end
from tests.tiny import TINY

HALF = (torch.bfloat16, torch.float16)


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def products(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return results and gradients of torch's matrix multiplication operators and their variants, keyed by case."""
    x, y, z = made(dtype, 33, 65).requires_grad_(), made(dtype, 65, 17).requires_grad_(), made(dtype, 33, 17)
    batches, matrices, sums = made(dtype, 3, 33, 65), made(dtype, 3, 65, 17), made(dtype, 3, 33, 17)
    q = made(dtype, 2, 4, 40, 16).requires_grad_()
    offsets = torch.tensor([8, 8, 32], dtype=torch.int32)
    with torch.no_grad():
        found = {
            "out": torch.mm(x, y, out=torch.empty(17, 33, dtype=dtype).t()),
            "empty out": torch.mm(x, y, out=torch.empty(0, dtype=dtype)),
            "few rows": F.linear(x[:2], y.t().contiguous()),
            "addmm": torch.addmm(z, x, y, beta=0.5, alpha=2),
            "addmm_": z.clone().addmm_(x, y, beta=0),
            "addmm out": torch.addmm(z, x, y, out=torch.empty_like(z)),
            "bias": F.linear(batches, matrices[0].t(), z[0]),
            "bmm": batches @ matrices,
            "baddbmm": torch.baddbmm(sums, batches, matrices, beta=2),
            "baddbmm_": sums.clone().baddbmm_(batches, matrices, alpha=3),
            "grouped": F.grouped_mm(x[:32, :64].contiguous(), matrices[:, :64, :16].contiguous(), offs=offsets),
        }
    product = x @ y
    found |= {"mm": product.detach()} | dict(zip("xy", torch.autograd.grad(product, (x, y), z), strict=True))
    for name, kv, arguments in (
        ("causal", q, {"is_causal": True}),
        ("grouped heads", q[:, :2], {"enable_gqa": True}),
        ("mask", q, {"attn_mask": made(dtype, 40, 40)}),
    ):
        out = F.scaled_dot_product_attention(q, kv, kv, **arguments)
        found[f"attention, {name}"] = out.detach()
        found[f"its gradient, {name}"] = torch.autograd.grad(out.float().square().sum(), q)[0]
    return found


def both_ways(rank: int, world_size: int) -> None:
    x, y = made(torch.float16, 33, 65), made(torch.float16, 65, 17)
    with mock.patch.object(cpu_half, "_replaced", set()):
        plain = {dtype: products(dtype) for dtype in (*HALF, torch.float32)}
        for dtype in HALF:
            cpu_half.multiply_in_fp32(dtype)
        for dtype, expected in plain.items():
            for name, found in products(dtype).items():
                assert found.stride() == expected[name].stride(), name
                # Results are rounded only once, so they differ from torch's results by at most one rounding error.
                # Attention gradients are exceptions, because kernels also round intermediate
                # results.
                bound = {torch.float32: 0.0}.get(dtype, torch.finfo(dtype).eps * (4 if "gradient" in name else 1))
                largest = float(expected[name].abs().max())
                torch.testing.assert_close(found, expected[name], rtol=bound, atol=bound * largest)
        # the result equals an fp32 product that is rounded once, unlike the result of torch's own fp16 kernel
        assert torch.equal(x @ y, (x.float() @ y.float()).half())
        for wrong in (lambda: x @ y.float(), lambda: torch.mm(x, y, out=torch.empty(33, 17))):
            with pytest.raises(RuntimeError, match="dtype"):
                wrong()


def test_products_in_fp32_match_torch_within_one_rounding() -> None:
    run_world(1, both_ways)


MODEL = f"{TINY} --hidden-size 32 --seq-length 16 --train-iters 3 --log-interval 1 --swiglu --normalization RMSNorm "
MODEL += "--attention-dropout 0 --hidden-dropout 0 "


def trained(rank: int, world_size: int, flags: str, without: int | None) -> tuple[str, set[torch.dtype]]:
    """Train a model. The rank `without` behaves as if its CPU had no instructions for half-precision GEMMs. Return the
    printed output and the dtypes whose GEMMs are computed in fp32."""
    printed = io.StringIO()
    with (
        mock.patch.object(cpu_half, "has_products_of", return_value=rank != without),
        mock.patch.object(cpu_half, "_replaced", set()),
        redirect_stdout(printed),
    ):
        train_to_the_end(rank, world_size, (MODEL + flags).split())
        return printed.getvalue(), cpu_half._replaced


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", printed)]


RUNS = [
    ("--bf16", torch.bfloat16),
    ("--bf16 --tp 2 --sequence-parallel --num-experts 4", torch.bfloat16),
    ("--fp16 --initial-loss-scale 256", torch.float16),
    ("--optimizer muon", torch.bfloat16),
]


@pytest.mark.parametrize(("flags", "dtype"), RUNS)
def test_all_ranks_multiply_in_fp32_if_one_must(flags: str, dtype: torch.dtype) -> None:
    (plain, _), (_, none) = run_world(2, trained, flags, None)
    (printed, first), (_, second) = run_world(2, trained, flags, 1)
    assert none == set() and "computed in fp32" not in plain
    assert first == second == {dtype}
    name = str(dtype).removeprefix("torch.")
    assert f" matrix products of {name} are computed in fp32: no instructions for them on rank 1 (on " in printed
    assert len(losses(plain)) == 3
    assert losses(printed) == pytest.approx(losses(plain), rel=4 * torch.finfo(torch.bfloat16).eps)


def test_operands_of_32_bits_are_unchanged() -> None:
    printed, replaced = run_world(1, trained, "", 0)[0]
    assert replaced == set() and "computed in fp32" not in printed
