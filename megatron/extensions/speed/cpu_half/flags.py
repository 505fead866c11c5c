"""Register the callback that computes 16-bit matrix products in fp32 on CPUs. This module does not import torch."""

from __future__ import annotations

from megatron.training.extensions import CALLBACKS

CALLBACKS.register(
    "16-bit products",
    f"{__package__}.products:ProductsInFp32",
    when=lambda config: config.parallel.fp16 or config.parallel.bf16 or bool(config.optimizer.whole_roles),
)
