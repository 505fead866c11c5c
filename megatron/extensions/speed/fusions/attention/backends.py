"""Additional choices of --attention-backend. On devices other than GPUs, torch's own kernels are used for these
choices. flash3 is FlashAttention-3 for Hopper GPUs (arXiv 2407.08608), and requires the module `flash_attn_interface`.
The public functions of `flash_attn_interface` are autograd functions. The adapter instead calls the module's internal
forward and backward functions, because tiles need a backward pass that starts from a merged output and log-sum-exp. The
names of the arguments for the window and the causal mask differ between versions of `flash_attn_interface`. cuDNN
computes tiles (`megatron.core.attention.tile_kernels`) in 16 bits. cuDNN builds an execution plan for each shape, which
takes longer than a training step. Therefore, cuDNN computes only the tiles of context parallelism, which have few
shapes. For documents and windows, whose lengths differ from batch to batch, FlashAttention is used instead.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import FusedAttention, TorchBackend
from megatron.core.attention.tile_kernels import Dropout, Gradients, Kernel, Outputs, Rows, TorchKernel
from megatron.core.attention.tiles import Tile
from megatron.core.attention.varlen import Lengths, PackedAttention, Window
from megatron.core.torch_private import cudnn_attention, cudnn_attention_backward
from megatron.extensions.speed.fusions.attention.flash_dropout import FlashDropoutKernel
from megatron.extensions.speed.fusions.attention.flash_kernels import by_head, flash_kernel

MODULE = "flash_attn_interface"

CAUSAL: Window = (-1, 0)

SCALES = "q_descale", "k_descale", "v_descale"
"""Names of the FlashAttention-3 parameters that receive the scales [b, groups]."""


class Flash3:
    """Forward and backward pass of FlashAttention-3. The constructor raises ImportError if the package is not installed
    or lacks the required functions.

    Operands are either packed, q [rows, heads, d] with `lengths`, or dense, q [b, n, heads, d]. The log-sum-exp is
    fp32, [heads, rows] or [b, heads, n].
    """

    def __init__(self, scale: float) -> None:
        package = importlib.import_module(MODULE)
        try:
            self._forward, self._backward = package._flash_attn_forward, package._flash_attn_backward
        except AttributeError as error:
            raise ImportError(f"{MODULE} has an unsupported version: {error}") from None
        self.scale = scale
        self._forward_names, self._backward_names = _parameters(self._forward), _parameters(self._backward)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Lengths | None,
        window: Window,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the output and the log-sum-exp.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            lengths: Lengths of packed sequences; None for dense operands.
            window: Pair (left, right). A query attends to `left` keys before and `right` keys after its position. A
                value of -1 means no limit.
            scales: Scales [3, b, groups] of q, k and v in e4m3. If scales are given, the output is bf16. Raises
                ImportError if the package does not support scales.
        """
        settings = _mask(window, self._forward_names) | _lengths(lengths)
        if scales is not None:
            if SCALES[0] not in self._forward_names:
                raise ImportError(f"{MODULE} has a version that does not support fp8 scales for each head")
            settings |= dict(zip(SCALES, scales, strict=True))
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


def _parameters(function: Callable[..., object]) -> frozenset[str]:
    """Return the names of the parameters that a function accepts. For a custom operator of torch, return the parameters
    of the Python function that implements the operator."""
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _mask(window: Window, names: frozenset[str]) -> dict[str, object]:
    causal = {"causal" if "causal" in names else "is_causal": window == CAUSAL}
    if "window_size" in names:
        return causal | {"window_size": window}
    return causal | {"window_size_left": window[0], "window_size_right": window[1]}


def _lengths(lengths: Lengths | None) -> dict[str, object]:
    if lengths is None:
        return {}
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))


class CudnnKernel(TorchKernel):
    """cuDNN attention kernel, which is launched once per tile and does not support windows."""

    needs_places, most_queries = False, None

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.packed = CudnnPackedKernel(scale)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Outputs:
        assert tile.window is None, "FlashAttention computes windows"
        out, lse = cudnn_forward((by_head(q), by_head(k), by_head(v)), tile.diagonal, self.scale)
        return out.permute(2, 0, 1, 3), lse.squeeze(-1).permute(2, 0, 1)

    def _backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Gradients:
        kept = by_head(rows.out), rows.lse.permute(1, 2, 0).contiguous()[..., None]
        qkv = by_head(q), by_head(k), by_head(v)
        dq, dk, dv = cudnn_backward(by_head(rows.grad), qkv, kept, tile.diagonal, self.scale)
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


class CudnnPackedKernel:
    """cuDNN kernel for packed samples of equal length."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, window: Window) -> tuple[Tensor, ...]:
        out, lse = cudnn_forward(tuple(_of_samples(x, lengths, window) for x in (q, k, v)), True, self.scale)
        return out.transpose(1, 2).flatten(0, 1), lse

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, out, *rows = (_of_samples(x, lengths, window) for x in (grad, kept[0], *qkv))
        grads = cudnn_backward(grad, tuple(rows), (out, kept[1]), True, self.scale)
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in grads)
        return dq, dk, dv


def _of_samples(x: Tensor, lengths: Lengths, window: Window) -> Tensor:
    """Unpack samples: [b * s, heads, d] -> [b, heads, s, d]."""
    samples, longest = len(lengths[0]) - 1, lengths[2]
    assert window == CAUSAL and samples * longest == len(x), "FlashAttention computes documents"
    return x.unflatten(0, (samples, -1)).transpose(1, 2)


def cudnn_forward(qkv: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention: q [b, heads, n, d], k [b, groups, m, d] and v [b, groups, m, dv] -> output [b, heads, n, dv]
    and log-sum-exp [b, heads, n, 1] in fp32."""
    return cudnn_attention(*qkv, None, True, 0.0, causal, False, scale=scale)[:2]


def cudnn_backward(
    grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        grad: Output gradient [b, heads, n, dv].
        qkv: Queries, keys and values.
        kept: Tensors that the forward pass returned.
        causal: Whether attention is causal.
        scale: Factor by which the scores are multiplied.
    """
    n, m = qkv[0].shape[2], qkv[1].shape[2]
    unused = torch.zeros((), dtype=torch.int64, device=grad.device)  # random state for dropout, which is disabled here
    return cudnn_attention_backward(grad, *qkv, *kept, unused, unused, None, None, None, n, m, 0.0, causal, scale=scale)


class Flash3Attention(FusedAttention):
    """Causal attention on dense operands with FlashAttention-3."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.flash3 = Flash3(scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] -> [s, b, heads,
        dv]."""
        dense = (x.transpose(0, 1) for x in (q, k, v))
        return PackedAttention.apply(*dense, None, self.flash3, None, CAUSAL).transpose(0, 1)


class FlashBackend(TorchBackend):
    """Backend that uses torch's attention kernels, and torch's FlashAttention for tiles."""

    def tiles(self) -> tuple[Kernel, Kernel]:
        kernel = flash_kernel(self.operands)
        return kernel, kernel


class Flash3Backend(TorchBackend):
    def causal(self) -> nn.Module:
        return Flash3Attention(self.scale) if self.operands.device.type == "cuda" else FusedAttention(self.scale)

    def tiles(self) -> tuple[Kernel, Kernel]:
        kernel = flash_kernel(self.operands, Flash3)
        return kernel, kernel


class CudnnBackend(TorchBackend):
    def tiles(self) -> tuple[Kernel, Kernel]:
        flash = flash_kernel(self.operands)
        return CudnnKernel(self.scale) if self.operands.device.type == "cuda" else flash, flash


class TritonBackend(FlashBackend):
    """Backend that uses the fused attention kernel with dropout if the kernel supports the operands."""

    def dropout(self, dropout: Dropout) -> Kernel:
        return FlashDropoutKernel(self.scale, dropout)
