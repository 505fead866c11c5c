"""Plan GPU runs without a GPU: select the kernels and count the memory of a GPU run, on tensors without values.

torch cannot run a backward pass on fake tensors of an absent GPU, so plans for GPUs use tensors of another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import unwrap
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron.core import batched_gemms
from megatron.core.attention.backends import ATTENTION_BACKENDS, AttentionBackend, AttentionOperands
from megatron.core.attention.tile_kernels import (
    Dropout,
    Gradients,
    Kernel,
    Outputs,
    Rows,
    TorchKernel,
    key_rows,
    query_rows,
)
from megatron.core.attention.tiles import Tile
from megatron.core.attention.varlen import Lengths, Window
from megatron.core.compiled_regions import CompiledRegion
from megatron.core.config.layers import Span
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.kernels import LEFT_OUT
from megatron.core.tensor_parallel import weight_grad
from megatron.core.tensor_parallel.layers import Hardware
from megatron.core.torch_private import AutogradContext, cpu_attention, device_constructors
from megatron.extensions.plan.planner.live_memory import LiveMemory
from megatron.extensions.plan.planner.time.expert_products import planned_expert_products
from megatron.extensions.speed.fp8 import casts
from megatron.extensions.speed.fp8.casts import Scaled
from megatron.extensions.speed.fusions.attention.flash_dropout import FlashDropoutKernel, fits
from megatron.extensions.speed.fusions.attention.flash_kernels import FlashCUDAKernel, fits_flash
from megatron.extensions.speed.fusions.attention.fp8_attention import Fp8Attention
from megatron.extensions.speed.fusions.kernel_choice import operations, planned_kernels

T = TypeVar("T")


class Launches(Protocol):
    """Interface for recording planned kernel launches that do not appear as torch operators."""

    any_order: bool
    """True if kernels may add values in any order, using nondeterministic atomics."""

    def attention(
        self,
        pairs: float,
        width: int,
        value_width: int,
        length: int,
        backward: bool,
        dropout: bool = False,
        *,
        backend: str | None = None,
    ) -> None:
        """Record an attention kernel launch.

        Args:
            pairs: Number of query-key pairs over all heads.
            width: Query and key channels per head.
            value_width: Value channels per head.
            length: Number of keys.
            backward: True for a backward pass.
            dropout: True if dropout is applied. Both kernels of a backward pass with dropout count as one launch.
            backend: Name of the kernel; the default is the backend of the plan.
        """

    def product(self, name: str, a: Tensor, b: Tensor, out: Tensor, options: dict[str, object]) -> None:
        """Record a matrix product for which torch has no kernel that supports tensors without values.

        If the name ends with _, the product is added to `out`, unless `options["beta"]` is 0.
        """

    def gathered(self, flops: float, read: float, added: float = 0.0) -> None:
        """Record the launch of a kernel that gathers rows. The kernel computes `flops` FLOPs, reads `read` bytes of
        rows, and adds `added` bytes of fp32 values to rows in any order."""

    def unseen(self) -> AbstractContextManager[None]:
        """Context manager within which operators are not recorded, because their launch is already recorded."""

    def some_of(self, parts: Sequence[T]) -> Iterable[T]:
        """Select the `parts` of a loop that are run during planning. Each may represent several similar parts."""

    def at_one_time(self, count: int) -> AbstractContextManager[None]:
        """Context manager for `count` products, several of which may run concurrently."""


class Unrecorded:
    """Implementation of `Launches` that records nothing and runs every part of a loop."""

    any_order = True

    def attention(self, *sizes: float, dropout: bool = False, backend: str | None = None) -> None:
        pass

    def product(self, name: str, a: Tensor, b: Tensor, out: Tensor, options: dict[str, object]) -> None:
        pass

    def gathered(self, flops: float, read: float, added: float = 0.0) -> None:
        pass

    def unseen(self) -> AbstractContextManager[None]:
        return nullcontext()

    def some_of(self, parts: Sequence[T]) -> Iterable[T]:
        return parts

    def at_one_time(self, count: int) -> AbstractContextManager[None]:
        return nullcontext()


UNRECORDED = Unrecorded()


class PlannedFlash:
    """FlashAttention on packed sequences, for plans. The methods allocate outputs, but no temporary memory."""

    def __init__(self, launches: Launches = UNRECORDED) -> None:
        self.launches = launches

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, window: Window
    ) -> tuple[Tensor, Tensor]:
        self._launch(q, v, lengths, window, False)
        return q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths | None, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._launch(qkv[0], qkv[2], lengths, window, True)
        return _gradients_of(*qkv)

    def _launch(self, q: Tensor, v: Tensor, lengths: Lengths | None, window: Window, backward: bool) -> None:
        """Record an attention launch over complete samples. `FakeKernel` records launches over attention tiles."""
        if lengths is not None:
            (rows, heads, width), longest = q.shape, lengths[2]
            seen = Span(window[0] + 1 or None).mean(longest)
            self.launches.attention(rows * heads * seen, width, v.shape[-1], longest, backward)


class PlannedFlashKernel(FlashCUDAKernel):
    """FlashAttention kernel for plans. The kernel packs tiles as on GPUs, but computes nothing."""

    def __init__(self, launches: Launches = UNRECORDED) -> None:
        super().__init__(PlannedFlash(launches))

    def lengths(self, tiles: Sequence[Tile], q: Tensor) -> Any:
        """Return None, because a tensor of lengths that was created in one plan must not be reused in another."""
        return None


def _launch(
    launches: Launches, q: Tensor, v: Tensor, tiles: Sequence[Tile], backward: bool, dropout: bool = False
) -> None:
    """Record one attention kernel launch that computes the queries of all tiles."""
    _, samples, heads, width = q.shape
    pairs = heads * sum(seen_pairs(tile) * (samples if tile.sample is None else 1) for tile in tiles)
    keys = max(tile.keys.stop for tile in tiles) - min(tile.keys.start for tile in tiles)
    length = min(keys, max(tile.window or keys for tile in tiles))
    launches.attention(pairs, width, v.shape[-1], length, backward, dropout)


@lru_cache(maxsize=1024)
def seen_pairs(tile: Tile) -> float:
    """Return the number of unmasked query-key pairs in an attention tile. Under a sliding window, only the pairs within
    the tile are counted."""
    n, m = len(tile.queries), len(tile.keys)
    if tile.window is not None:
        return float(
            sum(max(0, min(m, i + tile.offset + 1) - max(0, i + tile.offset + 1 - tile.window)) for i in range(n))
        )
    return n * m / 2 if tile.diagonal else float(n * m)


class FakeKernel:
    """Attention kernel that only allocates outputs, and records one launch per tile. If one tile covers all samples
    completely, no packing is needed, and one launch is recorded for any head width. Otherwise, as under context
    parallelism, the kernel in the attribute `parts` plans the tiles."""

    needs_places, most_queries = False, None

    def __init__(self, parts: Kernel | None = None, launches: Launches = UNRECORDED) -> None:
        self.parts, self.launches = parts, launches
        self.packed = None if parts is None else PlannedFlash(launches)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        made = ((tile, _outputs_of(query_rows(q, tile), v)) for tile in tiles)
        parts = self._parts_of(q, k, tiles)
        return self._launched(made if parts is None else parts.forward(q, k, v, tiles), q, v, backward=False)

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        made = ((tile, _gradients_of(query_rows(q, tile), key_rows(k, tile), key_rows(v, tile))) for tile in tiles)
        parts = self._parts_of(q, k, tiles)
        return self._launched(made if parts is None else parts.backward(rows, q, k, v, tiles), q, v, backward=True)

    def _parts_of(self, q: Tensor, k: Tensor, tiles: Sequence[Tile]) -> Kernel | None:
        """Return `self.parts`, or None if one tile contains all queries and keys of all samples."""
        one = len(tiles) == 1 and tiles[0].sample is None
        whole = one and len(tiles[0].queries) == q.shape[0] and len(tiles[0].keys) == k.shape[0]
        return None if whole else self.parts

    def _launched(
        self, found: Iterator[tuple[Tile, T]], q: Tensor, v: Tensor, backward: bool
    ) -> Iterator[tuple[Tile, T]]:
        """Record one attention launch per tile. The copies before and after a launch are not recorded separately."""
        while True:
            with self.launches.unseen():
                each = next(found, None)
            if each is None:
                return
            _launch(self.launches, query_rows(q, each[0]), v, each[:1], backward)
            yield each


def _outputs_of(q: Tensor, v: Tensor) -> Outputs:
    """Return the attention output, and the log-sum-exp of each row [..., heads]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[:-1], dtype=wide)


def _gradients_of(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class PlannedDropoutKernel(FlashDropoutKernel):
    """Planned attention kernel with dropout, which allocates its outputs but computes nothing."""

    def __init__(self, launches: Launches, scale: float, dropout: Dropout) -> None:
        super().__init__(scale, dropout)
        self.launches = launches

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Outputs:
        _launch(self.launches, q, v, tiles, False, dropout=True)
        return _outputs_of(q, v)

    def gradients(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Gradients:
        of_rows = [torch.empty(q.shape[:-1], dtype=torch.float32) for _ in range(3)]
        _launch(self.launches, q, v, tiles, True, dropout=True)
        grads = _gradients_of(q, k, v)
        del of_rows
        return grads


class PlannedBackend:
    """Attention backend that plans GPU kernels. cuDNN kernels are planned like FlashAttention, although only
    FlashAttention needs packed sequences."""

    def __init__(self, name: str, hardware: PlannedGPU, operands: AttentionOperands) -> None:
        self.name = name
        self.hardware = hardware
        self.operands = operands
        self.own: AttentionBackend = ATTENTION_BACKENDS.build(name, operands)
        self.always_tiles = self.own.always_tiles

    def causal(self) -> nn.Module:
        own = self.own.causal()
        return own.planned(self.hardware.launches) if isinstance(own, Fp8Attention) else own

    def tiles(self) -> tuple[Kernel, Kernel]:
        of = self.operands
        launches, packs = self.hardware.launches, self.hardware.packs
        if packs and (self.name == "unfused" or not fits_flash(of.dtype, of.head_dim, of.value_head_dim)):
            return TorchKernel(of.scale), TorchKernel(of.scale)
        kernel = FakeKernel(PlannedFlashKernel(launches) if packs else None, launches)
        return kernel, kernel

    def dropout(self, dropout: Dropout) -> Kernel:
        if self.hardware.fused_dropout:
            return PlannedDropoutKernel(self.hardware.launches, self.operands.scale, dropout)
        return self.own.dropout(dropout)


@dataclass(frozen=True)
class PlannedHardware(Hardware):
    """`Hardware` with which CPU runs are planned."""

    launches: Launches = UNRECORDED

    def each(self, parts: Sequence[T]) -> Iterable[T]:
        return self.launches.some_of(parts)

    def at_one_time(self, count: int) -> AbstractContextManager[None]:
        return self.launches.at_one_time(count)


@dataclass(frozen=True)
class PlannedGPU(PlannedHardware):
    """`Hardware` that plans a GPU run without a GPU. Attention tiles are packed as for FlashAttention on a GPU."""

    fused_dropout: bool = False
    """True if attention with dropout is one fused kernel."""

    packs: bool = True
    """True if all attention tiles of a rank are packed into one launch. If False, each tile is a separate launch with
    the tile's own shape, and any head width is supported."""

    def host_waits_for(self, x: Tensor) -> bool:
        return True

    def attention(self, backend: str, operands: AttentionOperands) -> AttentionBackend:
        return PlannedBackend(backend, self, operands)


def plans_fused_dropout(model: TransformerConfig, parallel: ModelParallelConfig) -> bool:
    """Return True if GPUs are expected to compute attention with dropout in one kernel."""
    dtype = getattr(torch, parallel.params_dtype)
    return parallel.attention_backend != "unfused" and fits(dtype, model.head_dim, model.value_head_dim)


class _NormOfGPUs(torch.autograd.Function):
    """Norm that saves the same tensors for backward as GPU kernels, namely the input and fp32 statistics of each row
    (`native_layer_norm` and `_fused_rms_norm` in torch's derivatives.yaml). torch saves other tensors on CPUs."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, statistics: int, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        kept = (torch.empty(x.shape[:-1], dtype=wide) for _ in range(statistics))
        ctx.save_for_backward(x, weight, bias, *kept)
        return x.clone()  # a copy moves as many bytes as the norm kernel

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors[:3]
        dw, db = (None if y is None else torch.empty_like(y) for y in (weight, bias))
        return torch.add(grads[0], x), None, dw, db


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call torch's fused attention kernel directly if it supports the arguments, because `scaled_dot_product_attention`
    does not select this kernel for tensors without values."""
    learned = attn_mask is not None and attn_mask.requires_grad
    if dropout_p or learned or q.shape[-1] != v.shape[-1]:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return cpu_attention(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


class PlannedRegions(TorchFunctionMode):
    """Torch function mode that passes each compiled region to `live`, which counts the region as one kernel."""

    def __init__(self, live: LiveMemory) -> None:
        super().__init__()
        self.live = live

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is CompiledRegion:
            with self:
                return self.live.run_region(func.function, args)
        return func(*args, **(kwargs or {}))


class PlannedFunctions(PlannedRegions):
    """Torch function mode that records the kernels that norms, fused attention, matrix products and compiled regions
    would use on a GPU. If `device` is given, tensors are created on this device. `with torch.device(device)` would have
    the same effect, but a second mode doubles the overhead of every function.

    Products in 16 bits and in fp8 are accumulated into fp32 weight gradients inside the kernel. For fp8 products, the
    Triton kernel is planned, regardless of the kernel that `gemm_choice` selects. All experts share one grouped kernel
    (`time/expert_products.py`). If this process disables the grouped kernel, each expert has its own kernel.
    """

    def __init__(
        self, live: LiveMemory, launches: Launches = UNRECORDED, device: str | None = None, fused: bool = True
    ) -> None:
        """Create the mode. If `fused` is True, an operation is planned as its fused kernel if this kernel has a plan
        (`FusedKernel.planned`) and is not disabled in this process."""
        super().__init__(live)
        self.launches, self.device = launches, device
        kernels = planned_kernels() if fused else {}
        self.own: dict[Callable[..., object], Callable[..., object]] = {
            plain: partial(kernels[name], launches) if name in kernels and name not in LEFT_OUT else plain
            for plain, name in operations().items()
        }
        self.own |= {
            unwrap(casts.dequantized_mm): self._dequantized_mm,
            unwrap(casts.add_fp8_product_): self._add_fp8_product_,
            **planned_expert_products(launches, fused),
            unwrap(batched_gemms.bmm_in_fp32): self._bmm_in_fp32,
            unwrap(weight_grad.add_product_): self._add_product_,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.device is not None and func in device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = self.device
        if func in (F.rms_norm, F.layer_norm):
            statistics = 1 if func is F.rms_norm else 2
            return _NormOfGPUs.apply(args[0], statistics, kwargs.get("weight"), kwargs.get("bias"))
        if func is F.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if (planned := self.own.get(func)) is not None:
            with self:
                return planned(*args)
        out = super().__torch_function__(func, types, args, kwargs)
        if func is torch.tensor and out.is_meta:  # dispatch modes do not intercept the operations inside torch.tensor
            return torch.ops.aten.lift_fresh(out)
        return out

    def _dequantized_mm(
        self, a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Plan the fp8 product a b^T -> [n, m], for a [n, k] and b [m, k]."""
        if out is None:
            out = torch.empty(a.values.shape[0], b.values.shape[0], dtype=out_dtype)
        self.launches.product("fp8", a.values, b.values.t(), out, {})
        return out

    def _add_fp8_product_(self, out: Tensor, dy: Scaled, x: Scaled, overwrite: bool) -> None:
        """Plan out [o, i] += dy [o, n] x [i, n]^T. If `overwrite` is True, plan out = dy x^T."""
        self.launches.product("fp8_", dy.values, x.values.t(), out, {"beta": not overwrite})

    def _bmm_in_fp32(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Plan the batched product of a [n, i, k] and b [n, k, j]. Returns [n, i, j]."""
        out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=dtype, device=a.device)
        self.launches.product("bmm", a, b, out, {})
        return out

    def _add_product_(self, out: Tensor, dy: Tensor, x: Tensor, overwrite: bool = False) -> None:
        """Plan out [o, i] += dy [n, o]^T x [n, i]. If `overwrite` is True, plan out = dy^T x."""
        if out.dtype == torch.float32 and dy.dtype != out.dtype:
            torch.addmm(out, dy.t(), x, out_dtype=torch.float32, beta=0 if overwrite else 1, out=out)
        else:
            unwrap(weight_grad.add_product_)(out, dy, x, overwrite)
