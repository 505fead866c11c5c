"""FlashAttention-3 for Hopper GPUs (arXiv 2407.08608), where its module `flash_attn_interface` is installed.

Its module has public functions with autograd of their own. The two functions below them are called here, as tiles
need a backward from a merged output and log-sum-exp. The spelling of windows and of causality differs between versions.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.varlen import Lengths, Window

MODULE = "flash_attn_interface"

CAUSAL: Window = (-1, 0)


class Flash3:
    """Forward and backward of the package. Raises ImportError where it is not installed, or has other functions.

    Operands are packed, q [rows, heads, d] with `lengths`, or else dense, q [b, n, heads, d]. The log-sum-exp is fp32,
    [heads, rows] or [b, heads, n].
    """

    def __init__(self, scale: float) -> None:
        package = importlib.import_module(MODULE)
        try:
            self._forward, self._backward = package._flash_attn_forward, package._flash_attn_backward
        except AttributeError as error:
            raise ImportError(f"{MODULE} is of a version that is not known here: {error}") from None
        self.scale = scale
        self._forward_names, self._backward_names = _parameters(self._forward), _parameters(self._backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, window: Window) -> tuple[Tensor, ...]:
        settings = _mask(window, self._forward_names) | _lengths(lengths)
        out, lse, *_ = self._forward(q, k, v, softmax_scale=self.scale, **settings)
        return out, lse

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths | None, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = kept
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv)
        settings = _mask(window, self._backward_names) | _lengths(lengths)
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._backward(
            grad,
            *qkv,
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=self.scale,
            deterministic=deterministic,
            **settings,
        )
        return dq, dk, dv


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters; a custom operation of torch keeps its function."""
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _mask(window: Window, names: frozenset[str]) -> dict[str, Any]:
    causal = {"causal" if "causal" in names else "is_causal": window == CAUSAL}
    if "window_size" in names:
        return causal | {"window_size": window}
    return causal | {"window_size_left": window[0], "window_size_right": window[1]}


def _lengths(lengths: Lengths | None) -> dict[str, Any]:
    if lengths is None:
        return {}
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))


def flash3_attention(q: Tensor, k: Tensor, v: Tensor, flash: Flash3) -> Tensor:
    """Causal attention of whole samples: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] ->
    [s, b, heads, dv]. Saved for the backward are these, the output and the log-sum-exp."""
    return _Flash3Attention.apply(*(x.transpose(0, 1) for x in (q, k, v)), flash).transpose(0, 1)


class _Flash3Attention(torch.autograd.Function):
    """q [b, s, heads, d], k [b, s, groups, d], v [b, s, groups, dv] -> [b, s, heads, dv]"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flash: Flash3) -> Tensor:
        kept = flash.forward(q, k, v, None, CAUSAL)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.flash = flash
        return kept[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        return *ctx.flash.backward(grad, (q, k, v), tuple(kept), None, CAUSAL), None
