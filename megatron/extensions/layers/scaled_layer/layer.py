"""Layer whose output is multiplied by a scalar that is stored in the checkpoint."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer


class ScaledLayer(TransformerLayer):
    """`TransformerLayer` whose output is multiplied by layer_scalar. The scalar is 1 in a new model. In a converted
    model, the scalar is read from the checkpoint. The scalar is saved in checkpoints, but not trained."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        meta = ParamMeta(f"{name}.layer_scalar", (1,), init=Init("constant", value=1.0), role="state")
        one = torch.ones(meta.global_shape, dtype=torch.float32, device=ctx.device)
        self.layer_scalar = nn.Parameter(one, requires_grad=False)
        self.layer_scalar.meta = meta  # type: ignore[attr-defined]
        residual = None if config.residual is None else RESIDUALS[config.residual]
        of_stream = getattr(residual, "scaled", None)
        self.scaled = None if of_stream is None else partial(of_stream, config=config)
        """Function that scales only the hidden states in the residual stream, if the stream contains additional
        channels; otherwise None."""

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        stream, factor = super().forward(x, context), self.layer_scalar.to(x.dtype)
        return stream * factor if self.scaled is None else self.scaled(stream, factor)
