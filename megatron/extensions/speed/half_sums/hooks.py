"""Callback that changes a torch setting, so that cuBLAS adds partial sums of bf16 GEMMs in fp32."""

from __future__ import annotations

import torch

from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime


class SumsInFp32(Callback):
    """Callback that, before the model is built, prevents cuBLAS from adding partial sums of bf16 GEMMs in bf16. The
    setting applies to the whole process."""

    def on_setup(self, runtime: Runtime) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
