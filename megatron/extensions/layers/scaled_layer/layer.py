"""A layer whose output is multiplied by a stored number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer


class ScaledLayer(TransformerLayer):
    """The hidden states after both sublayers times layer_scalar, 1 at the start. The number is saved in checkpoints
    and not trained; converted models bring theirs."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        meta = ParamMeta(f"{name}.layer_scalar", (1,), init=Init("constant", value=1.0), role="state")
        one = torch.ones(meta.global_shape, dtype=torch.float32, device=ctx.device)
        self.layer_scalar = nn.Parameter(one, requires_grad=False)
        self.layer_scalar.meta = meta  # type: ignore[attr-defined]

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h] -> [s, b, h]; [s/tp, b, h] under sequence parallelism"""
        return super().forward(x, context) * self.layer_scalar.to(x.dtype)
