"""FlashAttention-3 and cuDNN, as their definitions compute on CPU: how they are called, and their backward."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.core_attention import kernels_of
from megatron.core.attention.tile_kernels import Causal, TorchKernel
from megatron.core.attention.tiles import rank_spans
from megatron.extensions.fusions.attention.backends import MODULE, CudnnKernel, Flash3, Flash3Attention
from megatron.extensions.fusions.attention.flash_kernels import FlashCPUKernel, FlashCUDAKernel
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
    """Lengths of the samples of dense operands [b, n, heads, d] in packed ones."""
    (b, n), m = q.shape[:2], k.shape[1]
    return torch.arange(0, b * n + 1, n), torch.arange(0, b * m + 1, m), n, m


class Package:
    """The two functions of `flash_attn_interface` that are called, packed and dense, as the tests' definitions compute
    them; the calls that were made."""

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

    def of_today(self) -> ModuleType:
        """With the names of versions whose functions are custom operations of torch."""
        module = ModuleType(MODULE)

        def _flash_attn_forward(
            q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
            causal=False, window_size_left=-1, window_size_right=-1,
        ):  # fmt: skip
            window = (window_size_left, window_size_right)
            assert causal == (window == (-1, 0))
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return *self.forward(q, k, v, lengths, window, softmax_scale), torch.empty(0), torch.empty(0)

        def _flash_attn_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
            max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
            window_size_right=-1, deterministic=False,
        ):  # fmt: skip
            window = (window_size_left, window_size_right)
            assert is_causal == (window == (-1, 0))
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            self.backward(dout, (q, k, v), out, softmax_lse, lengths, (dq, dk, dv), window, softmax_scale)

        # As torch's custom operations: an object that keeps its function.
        for name, function in (
            ("_flash_attn_forward", _flash_attn_forward),
            ("_flash_attn_backward", _flash_attn_backward),
        ):
            setattr(
                module,
                name,
                type("Operation", (), {"_init_fn": staticmethod(function), "__call__": staticmethod(function)})(),
            )
        return module

    def of_2024(self) -> ModuleType:
        """With the names of the first versions."""
        module = ModuleType(MODULE)

        def _flash_attn_forward(
            q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
            causal=False, window_size=(-1, -1),
        ):  # fmt: skip
            assert causal == (window_size == (-1, 0))
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return self.forward(q, k, v, lengths, window_size, softmax_scale)

        def _flash_attn_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
            max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, causal=False, window_size=(-1, -1),
            deterministic=False,
        ):  # fmt: skip
            assert causal == (window_size == (-1, 0))
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            self.backward(dout, (q, k, v), out, softmax_lse, lengths, (dq, dk, dv), window_size, softmax_scale)
            return dq, dk, dv, torch.empty(0)

        module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
        return module


@pytest.fixture(params=["of_today", "of_2024"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package()
    monkeypatch.setitem(sys.modules, MODULE, getattr(made, request.param)())
    return made


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("groups", [1, 4])
def test_tiles_by_flash3(groups: int, window: int | None, documents: Tensor | None, package: Package) -> None:
    """Documents, windows and the parts of context-parallel ranks, whose log-sum-exps are merged."""
    compare(FlashCUDAKernel(Flash3(SCALE)), groups, window, documents)
    assert set(package.calls) == {"packed"}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_whole_samples_by_flash3(groups: int, package: Package) -> None:
    inputs = operands(groups)
    out = Flash3Attention(SCALE)(*inputs)
    assert_equal_with_gradients(out, dense(*inputs, mask(None, None)), inputs, inputs, 1e-13)
    assert package.calls == ["dense"]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODULE not in sys.modules
    with pytest.raises(ImportError, match=MODULE):
        Flash3(SCALE)
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    with pytest.raises(ImportError, match=r"of a version that is not known here: .*_flash_attn_forward"):
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
def test_tiles_by_cudnn(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole samples, and the tiles of context-parallel ranks."""
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", dense_forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", dense_backward)
    compare(CudnnKernel(SCALE), groups, None, None)
    with pytest.raises(AssertionError, match="documents are left to FlashAttention"):
        local_attention(*operands(groups), Causal(CudnnKernel(SCALE), ((0, 7), (0,), (0,))))
    with pytest.raises(AssertionError, match="windows are left to FlashAttention"):
        local_attention(*operands(groups), Causal(CudnnKernel(SCALE), None, 5), rank_spans(LENGTH, 0, 2))


def test_the_signature_of_cudnn() -> None:
    """The operations of this torch take what is passed."""
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


def test_kernels_by_flag() -> None:
    cpu = torch.device("cpu")
    for backend in ("auto", "flash", "flash3", "cudnn"):
        assert [type(kernel) for kernel in kernels_of(backend, SCALE, torch.bfloat16, cpu, 8, 8)] == [
            FlashCPUKernel
        ] * 2
    assert [type(kernel) for kernel in kernels_of("unfused", SCALE, torch.bfloat16, cpu, 8, 8)] == [TorchKernel] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        plain, varlen = kernels_of("cudnn", SCALE, torch.bfloat16, torch.device("cuda", 0), 8, 8)
        assert type(plain) is CudnnKernel and type(varlen) is FlashCUDAKernel
