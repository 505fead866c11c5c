"""Attention with dropout on fake tensors as GPUs compute it: what the fused kernel allocates, without its values."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.flash_dropout.kernel import FlashDropoutKernel, fits
from megatron.core.attention.tile_kernels import Gradients, Outputs, Rows
from megatron.core.attention.tiles import Tile
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig


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
