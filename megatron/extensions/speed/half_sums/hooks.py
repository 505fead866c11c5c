"""Setting of torch by which cuBLAS adds partial sums of bf16 GEMMs in fp32."""

from __future__ import annotations

import torch

from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime


class SumsInFp32(Callback):
    """Callback that forbids cuBLAS to add partial sums of bf16 GEMMs in bf16, before the model is built. The setting
    belongs to the process."""

    def on_setup(self, runtime: Runtime) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
