"""Test that compiled regions compute the same results as uncompiled code, in the forward and in the backward pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dropout import dropout
from megatron.core.moe.experts import FusedWeightedActivation, GroupedBiasFunction
from megatron.core.moe.grouped_gemms import EACH, Segments
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.activations import FUNCTIONS, Bounded, FusedActivation, Kind, gelu_tanh, squared_relu
from megatron.core.transformer.norm import _divided_by_root_mean_square
from megatron.core.transformer.rotary import (
    rotate_queries_and_keys,
    rotate_queries_and_keys_interleaved,
    scaled_queries,
)
from megatron.training.initialize import check_compiler

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")

ANGLES = torch.arange(5 * 4).view(5, 1, 1, 4) / 7
LABELS = torch.arange(10).view(5, 2) * 3
SAMPLES = torch.tensor([3, 8])


def rotated(
    x: Tensor, compiled: bool, function: Callable[..., tuple[Tensor, Tensor]] = rotate_queries_and_keys
) -> Tensor:
    rotate = region(function, compiled)
    q, k = x.unflatten(-1, (-1, 10)).split((2, 2), 2)
    return torch.cat(rotate(q, k, ANGLES.cos().to(x.dtype), ANGLES.sin().to(x.dtype)), 2)


BOUNDED = Bounded("swiglu", 0.7, 2.0)


def activated(x: Tensor, compiled: bool, kind: Kind, biased: bool = False) -> Tensor:
    """Apply an activation function to x. If `biased` is True, the last token of x serves as the bias."""
    bias = x[-1, -1] if biased else None
    if compiled:
        return FusedActivation(kind, True)(x, bias)
    plain: dict[Kind, Callable[[Tensor], Tensor]] = {
        "identity": lambda z: z,
        "gelu": F.gelu,
        "gelu_tanh": gelu_tanh,
        "squared_relu": squared_relu,
        "swiglu": lambda z: F.silu(z[..., :20]) * z[..., 20:],
        "geglu": lambda z: F.gelu(z[..., :20]) * z[..., 20:],
        "geglu_tanh": lambda z: gelu_tanh(z[..., :20]) * z[..., 20:],
        "quick_geglu": lambda z: z[..., :20] * torch.sigmoid(1.702 * z[..., :20]) * z[..., 20:],
        BOUNDED: lambda z: F.silu(z[..., :20].clamp(max=0.7)) * (z[..., 20:].clamp(-0.7, 0.7) + 2),
    }
    return plain[kind](x if bias is None else x + bias)


def experts_of(x: Tensor, compiled: bool) -> Tensor:
    """Return the result of multiplying the rows of three experts by weights and adding sharded biases. The last two
    rows of the input belong to no expert."""
    rows, bias = x.flatten(0, 1)[:8], x[4].reshape(4, 20)[:3, :8]
    weights, segments = rows[:, 1].sigmoid(), Segments.of_counts(torch.tensor([3, 0, 3]), spare=True)
    if compiled:
        layer = SimpleNamespace(compiled=True, gemms=EACH, queue=None)
        y = FusedWeightedActivation.apply(rows, weights, "identity", True)
        return GroupedBiasFunction.apply(y, bias, weights, segments, 30, layer)[:6]
    added = torch.cat((bias[:1].expand(3, -1), bias[2:].expand(3, -1))) * weights[:6, None]
    return rows[:6] * weights[:6, None] + F.pad(added, (30, 2))


def heads_by_position(x: Tensor, compiled: bool) -> Tensor:
    """Normalize queries without a norm weight, and scale them by the attention temperature of their positions."""
    q, scales = x.unflatten(-1, (4, 10)), torch.linspace(1, 2, 5)[:, None, None, None]
    q = region(_divided_by_root_mean_square, compiled)(q, 1e-3)
    return region(scaled_queries, compiled)(q, scales).flatten(2)


REGIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    **{kind: partial(activated, kind=kind) for kind in FUNCTIONS},
    "bounded swiglu": partial(activated, kind=BOUNDED),
    "biased, bounded swiglu": partial(activated, kind=BOUNDED, biased=True),
    **{f"biased {kind}": partial(activated, kind=kind, biased=True) for kind in ("gelu", "squared_relu", "swiglu")},
    "experts with biases": experts_of,
    "heads by position": heads_by_position,
    "rotary": rotated,
    "interleaved rotary": lambda x, compiled: rotated(x, compiled, rotate_queries_and_keys_interleaved),
    "dropout": lambda x, compiled: dropout(x, 0.3, 1234567, SAMPLES, 7, compiled),
    "cross_entropy": lambda x, compiled: vocab_parallel_cross_entropy(x * 1, LABELS, Axis(), 36, compiled),
}


def with_gradient(run: Callable[[Tensor, bool], Tensor], x: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = run(x, compiled)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (dx,) = torch.autograd.grad(y, x, weights)
    return y.detach(), dx


PART = (
    *("geglu", "biased, bounded swiglu", "experts with biases", "heads by position", "interleaved rotary"),
    *("dropout", "cross_entropy"),
)
"""Names of the regions to test. Of several similar regions, only the region with the most operations is tested."""


def check_region(run: Callable[[Tensor, bool], Tensor]) -> None:
    x = torch.randn(5, 2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, plain in zip(with_gradient(run, x, True), with_gradient(run, x, False), strict=True):
        assert mine.dtype == plain.dtype and plain.abs().sum() > 0
        torch.testing.assert_close(mine, plain, rtol=1e-13, atol=1e-14)


@compiles
@pytest.mark.grid("name", PART, list(REGIONS))
def test_a_compiled_region_matches_the_plain_one(name: str) -> None:
    check_region(REGIONS[name])


@compiles
def test_compilation_does_not_worsen_rounding_in_bf16() -> None:
    x = torch.randn(5, 2, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    swiglu = REGIONS["swiglu"]
    exact = with_gradient(swiglu, x.double(), False)
    errors = [
        max((got.double() - want).abs().max().item() for got, want in zip(found, exact, strict=True))
        for found in (with_gradient(swiglu, x, True), with_gradient(swiglu, x, False))
    ]
    assert errors[0] <= errors[1]


@compiles
def test_a_static_region_is_compiled_for_each_shape() -> None:
    """The region is called with more shapes than torch's recompile limit. Beyond this limit, torch normally runs code
    uncompiled."""
    x = torch.randn(5, 2, 40, generator=torch.Generator().manual_seed(1))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 3):
        torch.testing.assert_close(region(squared_relu, True, static=True)(x[:rows]), squared_relu(x[:rows]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 2
    assert torch._dynamo.config.recompile_limit >= 64


def test_a_missing_compiler_is_reported_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="--compile needs a C\\+\\+ compiler on CPU, but there is no no-such-compiler"):
        check_compiler(ModelParallelConfig(compile=True), torch.device("cpu"))
    check_compiler(ModelParallelConfig(), torch.device("cpu"))


def test_regions_are_compiled_by_default_only_on_gpus() -> None:
    assert [ModelParallelConfig().compiles(kind) for kind in ("cuda", "cpu")] == [True, False]
    assert [ModelParallelConfig(compile=False).compiles(kind) for kind in ("cuda", "cpu")] == [False, False]
