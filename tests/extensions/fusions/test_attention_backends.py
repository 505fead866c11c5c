"""Tests of the calls and backward passes of FlashAttention-3 and cuDNN attention. On CPU, both kernels are replaced
with plain-torch definitions. Some kernels require keys and values of equal width. The tests also call them with values
of a different width."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.attention.backends import ATTENTION_BACKENDS, AttentionBackend, AttentionOperands
from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal, TorchKernel
from megatron.core.attention.tiles import rank_spans
from megatron.core.attention.varlen import packed_attention
from megatron.extensions.speed.fusions.attention import backends
from megatron.extensions.speed.fusions.attention.backends import MODULE, CudnnKernel, Flash3, Flash3Attention
from megatron.extensions.speed.fusions.attention.flash_kernels import EqualWidthsKernel, FlashCPUKernel, FlashCUDAKernel
from tests.pure.test_packed_attention import Twin
from tests.pure.test_tile_attention import (
    DOCUMENTS,
    LENGTH,
    SCALE,
    assert_equal_with_gradients,
    compare,
    dense,
    mask,
    operands,
    varlen_backward,
    varlen_forward,
)


def starts_of(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Pack the samples of dense operands [b, n, heads, d] and [b, m, heads, d] into one sequence each. Return the
    offsets of the samples in q and in k, and the lengths n and m."""
    (b, n), m = q.shape[:2], k.shape[1]
    return torch.arange(0, b * n + 1, n), torch.arange(0, b * m + 1, m), n, m


LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OPERANDS = ("q", "k", "v", *LENGTHS, "softmax_scale"), ("dout", "q", "k", "v", "out", "softmax_lse", *LENGTHS)
BACKWARD = ("dq", "dk", "dv", "softmax_scale", "deterministic")
WINDOWS = {"of today": ("window_size_left", "window_size_right"), "of 2024": ("window_size",)}
"""Names of the window parameters of flash_attn_interface's functions, keyed by package version."""


def function_of(run: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return a function that passes its arguments to `run` and whose parameters have the given names."""
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names])

    def function(*args: Any, **more: Any) -> Any:
        return run(**signature.bind(*args, **more).arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def mask_of(given: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[int, int]]:
    """Return the sequence lengths and the sliding window that are passed in a call."""
    window = given.get("window_size") or (given["window_size_left"], given["window_size_right"])
    assert given.get("causal", given.get("is_causal")) == (window == (-1, 0))
    return tuple(given.get(name) for name in LENGTHS), window


class Package:
    """Replacement for the package `flash_attn_interface` that records calls. The packed and dense functions of the
    replacement compute attention with plain torch."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], window: tuple[int, int], scale: float):
        self.calls.append("dense" if lengths[0] is None else "packed")
        settings = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        if lengths[0] is not None:
            return varlen_forward(q, k, v, *lengths, 0.0, window == (-1, 0), False, **settings)[:2]
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out, lse, *_ = varlen_forward(*rows, *starts_of(q, k), 0.0, window == (-1, 0), False, **settings)
        return out.view(q.shape), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()

    def backward(self, grad: Tensor, qkv, out: Tensor, lse: Tensor, lengths, grads, window, scale: float) -> None:
        settings = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        if lengths[0] is None:
            lengths = starts_of(qkv[0], qkv[1])
            lse = lse.transpose(0, 1).flatten(1)
            grad, out, *qkv = (x.flatten(0, 1) for x in (grad, out, *qkv))
        found = varlen_backward(grad, *qkv, out, lse, *lengths, 0.0, window == (-1, 0), None, None, **settings)
        for into, value in zip(grads, found, strict=True):
            into.copy_(value.view(into.shape))

    def module(self, version: str) -> ModuleType:
        """Return a module that replaces the given version of the attention package."""

        def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, **given: Any) -> tuple[Tensor, ...]:
            return *self.forward(q, k, v, *mask_of(given), softmax_scale), torch.empty(0)

        def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, **given: Any) -> None:
            lengths, window = mask_of(given)
            self.backward(dout, (q, k, v), out, softmax_lse, lengths, (dq, dk, dv), window, softmax_scale)

        today, module = version == "of today", ModuleType(MODULE)
        for name, run, names in (
            ("_flash_attn_forward", forward, (*OPERANDS[0], "causal")),
            ("_flash_attn_backward", backward, (*OPERANDS[1], *BACKWARD, "is_causal" if today else "causal")),
        ):
            function: Any = function_of(run, (*names, *WINDOWS[version]))
            if today:  # as in a torch custom operation, the function is an attribute of an object
                methods = {"_init_fn": staticmethod(function), "__call__": staticmethod(function)}
                function = type("Operation", (), methods)()
            setattr(module, name, function)
        return module


@pytest.fixture(params=WINDOWS)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setitem(sys.modules, MODULE, made.module(request.param))
    return made


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("groups", [1, 4])
def test_flash3_computes_tiles(groups: int, window: int | None, documents: Tensor | None, package: Package) -> None:
    """The cases include packed documents, windows, and context parallelism. The partial results of context-parallel
    attention are merged using their log-sum-exps."""
    compare(FlashCUDAKernel(Flash3(SCALE)), groups, window, documents)
    assert set(package.calls) == {"packed"}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flash3_computes_whole_samples(groups: int, package: Package) -> None:
    inputs = operands(groups)
    out = Flash3Attention(SCALE)(*inputs)
    assert_equal_with_gradients(out, dense(*inputs, mask(None, None)), inputs, inputs, 1e-13)
    assert package.calls == ["dense"]


def test_a_missing_flash3_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODULE not in sys.modules
    with pytest.raises(ImportError, match=MODULE):
        Flash3(SCALE)
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    with pytest.raises(ImportError, match=r"has an unsupported version: .*_flash_attn_forward"):
        Flash3(SCALE)


def dense_forward(q, k, v, bias, compute_lse, p, is_causal, debug, *, scale):
    assert bias is None and compute_lse and p == 0 and not debug and k.shape[1] <= q.shape[1]
    assert not is_causal or q.shape[2] == k.shape[2]
    tile = Package().forward(*(x.transpose(1, 2) for x in (q, k, v)), (None,), (-1, 0 if is_causal else -1), scale)
    return tile[0].transpose(1, 2), tile[1][..., None], None, None, q.shape[2], k.shape[2], None, None, None


def dense_backward(
    grad, q, k, v, out, lse, seed, offset, bias, starts_q, starts_k, max_q, max_k, p, is_causal, *, scale
):
    assert seed.dtype == offset.dtype == torch.int64 and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
    assert (bias, starts_q, starts_k, p) == (None, None, None, 0) and (max_q, max_k) == (q.shape[2], k.shape[2])
    grads = [torch.empty_like(x.transpose(1, 2)) for x in (q, k, v)]
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    window = (-1, 0 if is_causal else -1)
    Package().backward(grad.transpose(1, 2), rows, out.transpose(1, 2), lse[..., 0], (None,), grads, window, scale)
    return tuple(x.transpose(1, 2) for x in grads)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_cudnn_computes_tiles(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cuDNN kernel is tested on whole samples and on the attention tiles of context-parallel ranks."""
    monkeypatch.setattr(backends, "cudnn_attention", dense_forward)
    monkeypatch.setattr(backends, "cudnn_attention_backward", dense_backward)
    compare(CudnnKernel(SCALE), groups, None, None)
    with pytest.raises(AssertionError, match="FlashAttention computes documents"):
        local_attention(*operands(groups), Causal(CudnnKernel(SCALE), ((0, 7), (0,), (0,))))
    with pytest.raises(AssertionError, match="FlashAttention computes windows"):
        local_attention(*operands(groups), Causal(CudnnKernel(SCALE), None, 5), rank_spans(LENGTH, 0, 2))


def test_cudnn_has_the_expected_signature() -> None:
    """The installed torch accepts the arguments that the cuDNN backend passes."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [argument.name for argument in forward.arguments] == [
        *("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask"),
        "scale",
    ]
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema
    assert [argument.name for argument in backward.arguments] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias"),
        *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale"),
    ]
    assert CudnnKernel.most_queries is None


def built(backend: str, device: torch.device) -> AttentionBackend:
    found: AttentionBackend = ATTENTION_BACKENDS.build(backend, AttentionOperands(SCALE, torch.bfloat16, device, 8, 8))
    return found


def test_the_flag_chooses_the_kernel() -> None:
    cpu = torch.device("cpu")
    for backend in ("auto", "flash", "flash3", "cudnn", "unfused"):
        kind = TorchKernel if backend == "unfused" else FlashCPUKernel
        assert [type(kernel) for kernel in built(backend, cpu).tiles()] == [kind] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        plain, varlen = built("cudnn", torch.device("cuda", 0)).tiles()
        assert type(plain) is CudnnKernel and type(varlen) is FlashCUDAKernel


def operands_of(width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((12, 2, 4, width), (12, 2, 2, width), (12, 2, 2, value_width))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)  # type: ignore[return-value]


def gradients(out: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), qkv)


@pytest.mark.parametrize("widths", [(10, 6), (6, 10)])
@pytest.mark.parametrize("window", [None, 5])
def test_kernels_of_equal_widths_support_other_value_widths(widths: tuple[int, int], window: int | None) -> None:
    """A kernel that requires equal widths gives the same output and gradients as a kernel that supports different
    widths."""
    qkv, documents = operands_of(*widths), ((0, 5), (0, 7, 9))
    expected = local_attention(*qkv, Causal(TorchKernel(0.3), documents, window))
    assert expected.shape == (12, 2, 4, widths[1])
    found = local_attention(*qkv, Causal(FlashCPUKernel(0.3), documents, window))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(found, qkv), gradients(expected, qkv), rtol=1e-11, atol=1e-12)


def test_packed_kernels_of_equal_widths_support_other_value_widths() -> None:
    qkv = tuple(x[:, :1].detach().requires_grad_() for x in operands_of(10, 6))
    expected = local_attention(*qkv, Causal(TorchKernel(SCALE)))
    found = packed_attention(*qkv, None, None, EqualWidthsKernel(twin := Twin()))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found, qkv), gradients(expected, qkv))
    alike = (x[:, :1] for x in operands_of(10, 10))
    # the output gradient is an expanded view whose elements share memory
    packed_attention(*alike, None, None, EqualWidthsKernel(twin)).sum().backward()
    assert twin.contiguous
