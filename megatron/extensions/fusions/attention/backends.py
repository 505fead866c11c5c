"""The choices of --attention-backend that are not torch's own. On other devices than GPUs they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import AttentionBackend, FusedAttention
from megatron.core.attention.flash_kernels import flash_kernel
from megatron.core.attention.tile_kernels import Dropout, Kernel
from megatron.core.attention.varlen import Flash2
from megatron.extensions.fusions.attention.cudnn_kernels import CudnnKernel
from megatron.extensions.fusions.attention.flash3 import Flash3, flash3_attention
from megatron.extensions.fusions.attention.flash_dropout.kernel import FlashDropoutKernel


class Flash3Attention(FusedAttention):
    """Causal attention by the package of FlashAttention-3."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.flash3 = Flash3(scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash3_attention(q, k, v, self.flash3)


class Flash3Backend(AttentionBackend):
    @staticmethod
    def causal(scale: float, device: torch.device) -> nn.Module:
        return Flash3Attention(scale) if device.type == "cuda" else FusedAttention(scale)

    @staticmethod
    def tiles(
        scale: float, dtype: torch.dtype, device: torch.device, head_dim: int, value_head_dim: int
    ) -> tuple[Kernel, Kernel]:
        kernel = flash_kernel(scale, dtype, device, head_dim, value_head_dim, Flash3)
        return kernel, kernel


class CudnnBackend(AttentionBackend):
    @staticmethod
    def tiles(
        scale: float, dtype: torch.dtype, device: torch.device, head_dim: int, value_head_dim: int
    ) -> tuple[Kernel, Kernel]:
        flash = flash_kernel(scale, dtype, device, head_dim, value_head_dim, Flash2)
        return CudnnKernel(scale) if device.type == "cuda" else flash, flash


class TritonBackend(AttentionBackend):
    """The fused kernel of attention with dropout, where it has been found to run."""

    @staticmethod
    def dropout(scale: float, dropout: Dropout) -> Kernel:
        return FlashDropoutKernel(scale, dropout)
