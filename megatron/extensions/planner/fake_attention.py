"""Attention of tiles on fake tensors as GPUs compute it: what the kernels allocate, without their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.flash_kernels import FlashCUDAKernel, fits_flash, of_any_widths
from megatron.core.attention.tile_kernels import Gradients, Kernel, Outputs, Rows, TorchKernel
from megatron.core.attention.tiles import Tile
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.extensions.fusions.attention.flash_dropout.kernel import FlashDropoutKernel, fits


class PlannedFlash:
    """FlashAttention of packed sequences: makes what it returns, and nothing of what it takes and gives back."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any, window: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Any, window: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.new_empty(x.shape) for x in qkv)
        return dq, dk, dv


class PlannedFlashKernel(FlashCUDAKernel):
    """Packs tiles as on GPUs."""

    def __init__(self) -> None:
        super().__init__(PlannedFlash())

    def lengths(self, tiles: Sequence[Tile], q: Tensor) -> Any:
        """None: a real one would be kept on the fake device from one plan to the next."""
        return None


class PlannedKernel:
    """Attention of whole samples in one launch, which needs no packing and takes all widths, and of parts of samples,
    as context parallelism has them, by `parts`."""

    needs_places, most_queries, packed = False, None, None

    def __init__(self, parts: Kernel) -> None:
        self.parts = parts

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        if not _whole(tiles, q, k):
            yield from self.parts.forward(q, k, v, tiles)
            return
        yield tiles[0], (q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[:-1], dtype=torch.float32))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        if not _whole(tiles, q, k):
            yield from self.parts.backward(rows, q, k, v, tiles)
            return
        yield tiles[0], (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))


def _whole(tiles: Sequence[Tile], q: Tensor, k: Tensor) -> bool:
    """Whether all queries and keys of all samples are one tile."""
    if len(tiles) != 1 or tiles[0].sample is not None:
        return False
    return len(tiles[0].queries) == q.shape[0] and len(tiles[0].keys) == k.shape[0]


def planned_kernels_of(
    backend: str, scale: float, dtype: torch.dtype, device: torch.device, head_dim: int, value_head_dim: int
) -> tuple[Kernel, Kernel]:
    """`core_attention.kernels_of` as on GPUs; those of cuDNN, which need no packing, are planned as FlashAttention."""
    if backend == "unfused" or not fits_flash(dtype, head_dim, value_head_dim):
        return TorchKernel(scale), TorchKernel(scale)
    kernel = PlannedKernel(of_any_widths(PlannedFlashKernel(), head_dim, value_head_dim))
    return kernel, kernel


def plans_fused_dropout(model: TransformerConfig, parallel: ModelParallelConfig) -> bool:
    """Whether GPUs are expected to compute attention with dropout in one kernel."""
    dtype = getattr(torch, parallel.params_dtype)
    return parallel.attention_backend != "unfused" and fits(dtype, model.head_dim, model.value_head_dim)


class PlannedDropoutKernel(FlashDropoutKernel):
    """Makes tensors of the shapes that the kernel makes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Outputs:
        self.launched(q, v, tiles, False)
        return q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[:-1], dtype=torch.float32)

    def gradients(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...]) -> Gradients:
        of_rows = [torch.empty(q.shape[:-1], dtype=torch.float32) for _ in range(3)]
        self.launched(q, v, tiles, True)
        grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        del of_rows
        return grads

    def launched(self, q: Tensor, v: Tensor, tiles: tuple[Tile, ...], backward: bool) -> None:
        """Called at each launch."""
