"""The end of the model: hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.parameters import output_meta
from megatron.core.tensor_parallel.layers import OutputLayer, TPContext


class Head(OutputLayer):
    """The output layer with the model's scaling and cap of logits."""

    def __init__(
        self, config: TransformerConfig, ctx: TPContext, tied_stages: tuple[int, ...], tied_weight: nn.Parameter | None
    ) -> None:
        super().__init__(output_meta(config, tied_stages), ctx, tied_weight=tied_weight)
        self.divisor, self.cap = config.logits_scaling, config.final_logit_softcapping

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, h], or [s/tp, b, h] under sequence parallelism -> logits [s, b, V/tp]"""
        logits = super().forward(x if self.divisor == 1 else x / self.divisor)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
