"""Causal attention with a forward pass in 8-bit floating point and a backward pass in 16 bits.

Queries, keys and values are cast to e4m3. All heads of a group in a sample share a scale, which is a power of two. With
the casts q8, k8 and v8, and their scales sq, sk and sv:

    S = scale * (q8 sq) (k8 sk)ᵀ    P = exp(S - largest of the row)    out = round(256 P) (v8 sv) / (256 rowsum(P))

The softmax is in fp32, and its sums use the unrounded P. P is at most 1, so the factor of 256 lets P use most of the
range of e4m3, as in FlashAttention-3 (arXiv 2407.08608). 16-bit dtypes represent the rounded operands exactly, because
their scales are powers of two. The backward pass converts the saved casts back to 16 bits, so that its scores and
log-sum-exp equal those of the forward pass. Only the rounding of P uses a straight-through gradient. The forward pass
saves the fp8 casts instead of the 16-bit operands, which halves the memory for saved tensors.

For normally distributed operands, outputs and gradients differ from attention in fp64 by 3 to 6 % of their norm. Each
rounding to e4m3 contributes 2.6 %. Compared with fp64 attention on the rounded operands, outputs differ by 2 %, and
gradients by 1 % (`tests/extensions/fusions/test_fp8_attention.py`).

Three implementations of the fp8 forward pass exist. `Twin` is the reference implementation in plain torch, and runs on
every device. FlashAttention-3 and `fp8_attention_triton` run only on GPUs. torch's cuDNN attention cannot run the fp8
forward pass, because it does not accept scales.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.attention.tile_kernels import Rows, TorchKernel
from megatron.core.attention.tiles import Tile
from megatron.core.compiled_regions import region
from megatron.core.torch_private import AutogradContext
from megatron.extensions.speed.fp8.blockwise import power_of_two
from megatron.extensions.speed.fp8.casts import E4M3, multiplier_of, round_scaled
from megatron.extensions.speed.fusions.attention.backends import (
    CAUSAL,
    MODULE,
    Flash3,
    FlashBackend,
    cudnn_backward,
)
from megatron.extensions.speed.fusions.attention.flash_kernels import by_head
from megatron.extensions.speed.fusions.kernel_choice import gpu_operator

WEIGHTS = 256.0
"""Factor by which attention weights are multiplied before they are rounded to fp8."""

LARGEST = torch.finfo(E4M3).max


class CastHeads(NamedTuple):
    """Queries, keys and values in e4m3, with the fp32 scales that undo the multipliers."""

    q: Tensor
    """Queries [n, b, heads, d]."""
    k: Tensor
    """Keys [n, b, groups, d]."""
    v: Tensor
    """Values [b, groups, dv, n]. The sequence is the last dimension, because tensor cores sum 8-bit operands along
    their last dimension."""
    scales: Tensor
    """Scales [3, b, groups] of q, k and v."""


def cast_heads(q: Tensor, k: Tensor, v: Tensor) -> CastHeads:
    """Cast q [n, b, heads, d], k [n, b, groups, d] and v [n, b, groups, dv] to e4m3. If a value is not finite, the
    scale of its group is NaN, which makes the output NaN."""
    groups = k.shape[2]
    in_groups = (x.unflatten(2, (groups, -1)) for x in (q, k, v))
    amax = torch.stack([x.abs().amax((0, 3, 4)) for x in in_groups]).to(torch.float32)
    multiplier = power_of_two(multiplier_of(amax, LARGEST))
    of_q, of_k, of_v = multiplier[..., None]
    q8 = round_scaled(q.unflatten(2, (groups, -1)), of_q[..., None], E4M3).flatten(2, 3)
    v8 = round_scaled(v.permute(1, 2, 3, 0), of_v[..., None], E4M3)
    return CastHeads(q8, round_scaled(k, of_k, E4M3), v8, multiplier.reciprocal())


def restored_heads(cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Restore the exact values that casts represent: q [n, b, heads, d], k [n, b, groups, d] and v [n, b, groups,
    dv]."""
    groups = cast.k.shape[2]
    of_q, of_k, of_v = cast.scales[..., None]
    q = (cast.q.to(torch.float32).unflatten(2, (groups, -1)) * of_q[..., None]).flatten(2, 3)
    v = (cast.v.to(torch.float32) * of_v[..., None]).to(dtype)
    return q.to(dtype), (cast.k.to(torch.float32) * of_k).to(dtype), v.permute(3, 0, 1, 2).contiguous()


class Kernels(Protocol):
    """Base class of attention kernels with a forward pass in fp8 and a backward pass in 16 bits."""

    def forward(self, cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute the output [n, b, heads, dv] in `dtype`, and the log-sum-exp [b, heads, n] in fp32."""

    def backward(
        self, grad: Tensor, kept: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of q, k and v. `grad` [n, b, heads, dv] is the output gradient, `kept` contains the
        results of the forward pass, and `qkv` contains q, k and v after rounding to fp8."""


class Twin:
    """Reference implementation in plain torch, for any device. `Twin` computes attention for one group of heads at a
    time, and stores the scores of the group in memory."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.of_tiles = TorchKernel(scale)

    def forward(self, cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        qs, ks, vs = (x.permute(1, 2, 0, 3) for x in restored_heads(cast, torch.float32))
        hidden = torch.ones(qs.shape[2], qs.shape[2], dtype=torch.bool, device=qs.device).triu_(1)
        ratio = qs.shape[1] // ks.shape[1]
        outs, lses = [], []
        for q, k, v in zip(qs.split(ratio, 1), ks.split(1, 1), vs.split(1, 1), strict=True):
            scores = (self.scale * (q @ k.mT)).masked_fill_(hidden, float("-inf"))
            lses.append(scores.logsumexp(-1))
            weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            sums = WEIGHTS * weights.sum(-1, keepdim=True)
            outs.append((WEIGHTS * weights).to(E4M3).to(torch.float32) @ v / sums)
        return torch.cat(outs, 1).to(dtype).permute(2, 0, 1, 3), torch.cat(lses, 1)

    def backward(
        self, grad: Tensor, kept: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = kept
        everyone, groups = range(len(out)), qkv[1].shape[2]
        tile = Tile(None, everyone, everyone, 0, 0, diagonal=True)
        found = []
        parts = (x.chunk(groups, 2) for x in (grad, out, lse.permute(2, 0, 1), *qkv))
        for of_grad, of_out, of_lse, q, k, v in zip(*parts, strict=True):
            ((_, gradients),) = self.of_tiles.backward(Rows(of_grad, of_out, of_lse), q, k, v, [tile])
            found.append(gradients)
        dq, dk, dv = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        return dq, dk, dv


class Flash3Kernels:
    """Forward and backward pass with FlashAttention-3. The constructor raises ImportError if the package is not
    installed or does not support scales."""

    def __init__(self, scale: float) -> None:
        self.flash3 = Flash3(scale)

    def forward(self, cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dense = cast.q.transpose(0, 1), cast.k.transpose(0, 1), cast.v.permute(0, 3, 1, 2)
        out, lse = self.flash3.forward(*dense, None, CAUSAL, scales=cast.scales)
        return out.transpose(0, 1).to(dtype), lse

    def backward(
        self, grad: Tensor, kept: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, out, *dense = (x.transpose(0, 1) for x in (grad, kept[0], *qkv))
        dq, dk, dv = self.flash3.backward(grad, tuple(dense), (out, kept[1]), None, CAUSAL)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


class TritonKernels:
    """Forward pass with Triton, and backward pass with cuDNN."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _forward(*cast, self.scale, dtype)

    def backward(
        self, grad: Tensor, kept: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, out, *rows = (by_head(x) for x in (grad, kept[0], *qkv))
        grads = cudnn_backward(grad, tuple(rows), (out, kept[1][..., None]), True, self.scale)
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
        return dq, dk, dv


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    n, b, heads, _ = q.shape
    return q.new_empty(n, b, heads, v.shape[2], dtype=dtype), q.new_empty(b, heads, n, dtype=torch.float32)


_forward = gpu_operator(
    "attention.fp8_attention_triton:fp8_attention_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor scales, float scale, ScalarType dtype) -> (Tensor, Tensor)",
    _fake_forward,
)
"""Operator that computes `Kernels.forward`. The operator's first arguments are the fields of `CastHeads`."""


class Launches(Protocol):
    """Interface of the object in which a dry run records attention launches (`plan/planner/as_on_gpus.py`)."""

    def attention(
        self, pairs: float, width: int, value_width: int, length: int, backward: bool, *, backend: str
    ) -> None: ...


class PlannedKernels:
    """Attention kernels for a dry run, which estimates a GPU run without a GPU. These kernels record their launches
    under the kernel name `name`, and return uninitialized tensors with the shapes of the results."""

    def __init__(self, name: str, launches: Launches) -> None:
        self.name, self.launches = name, launches

    def forward(self, cast: CastHeads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self._launch(cast.q, cast.v.shape[2], False)
        return _fake_forward(*cast, 0.0, dtype)

    def backward(
        self, grad: Tensor, kept: tuple[Tensor, Tensor], qkv: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._launch(qkv[0], qkv[2].shape[3], True)
        dq, dk, dv = (x.new_empty(x.shape) for x in qkv)
        return dq, dk, dv

    def _launch(self, q: Tensor, value_width: int, backward: bool) -> None:
        n, b, heads, width = q.shape
        self.launches.attention(b * heads * n * n / 2, width, value_width, n, backward, backend=self.name)


class _Context(AutogradContext):
    kernels: Kernels
    compiled: bool
    dtype: torch.dtype


class _Fp8Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels, compiled: bool) -> Tensor:
        cast = region(cast_heads, compiled, static=True)(q, k, v)
        out, lse = kernels.forward(cast, q.dtype)
        ctx.save_for_backward(*cast, out, lse)
        ctx.kernels, ctx.compiled = kernels, compiled
        ctx.dtype = q.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        *cast, out, lse = ctx.saved_tensors
        qkv = region(restored_heads, ctx.compiled, static=True)(CastHeads(*cast), ctx.dtype)
        return *ctx.kernels.backward(grad, (out, lse), qkv), None, None


class Fp8Attention(nn.Module):
    """Causal attention among the queries and keys of one rank, with the interface of `FusedAttention`."""

    def __init__(self, name: str, kernels: Kernels, compiled: bool) -> None:
        """Create the attention module for the backend `name`. If `compiled` is True, the casts are compiled."""
        super().__init__()
        self.name, self.compiled = name, compiled
        self.kernels = kernels

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention: q [s, b, heads, d], k [s, b, groups, d], v [s, b, groups, dv] -> [s, b, heads, dv]."""
        out: Tensor = _Fp8Attention.apply(q, k, v, self.kernels, self.compiled)
        return out

    def planned(self, launches: Launches) -> Fp8Attention:
        """Return a version of this module whose kernels only record their launches, for a dry run."""
        return Fp8Attention(self.name, PlannedKernels(self.name, launches), compiled=True)


class Fp8Backend(FlashBackend):
    """Backend that computes plain causal attention in fp8. Documents, windows and context parallelism need attention in
    tiles, which torch's FlashAttention computes in 16 bits."""

    name = "fp8"

    def causal(self) -> nn.Module:
        on_gpu = self.operands.device.type == "cuda"
        return Fp8Attention(self.name, self.on_gpus() if on_gpu else Twin(self.scale), compiled=on_gpu)

    def on_gpus(self) -> Kernels:
        """Return the kernels that this backend uses on GPUs."""
        return Flash3Kernels(self.scale) if find_spec(MODULE) is not None else TritonKernels(self.scale)


class Fp8Flash3Backend(Fp8Backend):
    name = "fp8_flash3"

    def on_gpus(self) -> Kernels:
        return Flash3Kernels(self.scale)


class Fp8TritonBackend(Fp8Backend):
    name = "fp8_triton"

    def on_gpus(self) -> Kernels:
        return TritonKernels(self.scale)


KERNEL_ERROR = 0.06
"""Allowed difference between the outputs and gradients of a kernel and the results of `Twin`: the norm of the
difference, divided by the norm of the result of `Twin`. Both implementations round the attention weights to fp8 with an
error of 2.6 %. Their errors differ, because the kernel scales the weights by a row's maximum over the keys so far, and
`Twin` by the maximum over all keys."""


def error_beside_twin(kernels: Kernels, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> float:
    """Compute attention for q, k and v with `kernels` and with `Twin`. Return the largest relative difference between
    the two outputs, or between the two gradients of an input. Queries have the shape [n, b, heads, d]."""
    twin, grad = Twin(scale), torch.ones_like(qkv[0][..., :1]) * qkv[2][:, :, :1]
    found, expected = (_with_gradients(Fp8Attention("", each, compiled=False), qkv, grad) for each in (kernels, twin))
    errors = ((a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, expected, strict=True))
    return max(float("inf") if error.isnan() else error.item() for error in errors)


def _with_gradients(attention: nn.Module, qkv: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    own = [x.detach().requires_grad_() for x in qkv]
    out = attention(*own)
    return out.detach(), *torch.autograd.grad(out, own, grad)
