"""Multi-token prediction (MTP): modules after the last layer predict additional tokens (arXiv 2412.19437, section 2.2).

The module of depth k = 1, 2, ... combines the hidden states of depth k - 1 with the embedding of the token k positions
ahead, and predicts the token k + 1 positions ahead. Depth 1 reads the output of the model's final norm. All depths
share the model's embedding and head:

    x_k = eh_proj [enorm(Emb(t_{i+k})); hnorm(h_{k-1})]                                 (equation 21)
    h_k = final_layernorm(layer(x_k))                                                   (equation 22)
    loss = main loss + factor / N * sum over k of -log softmax(head(h_k))[t_{i+k+1}]    (equations 23 to 25)

The paper concatenates in the opposite order, but its published weights and Megatron-LM use the order above. Losses are
summed over tokens, and the sum is divided by the number of tokens that count in the main loss. The gradients therefore
do not depend on the parallel layout or the micro-batch size. At depth k, only s - k of the s tokens of a sample have a
label. As in Megatron-LM, the loss of depth k is multiplied by s / (s - k), so that it is a mean over the s - k tokens.
In the paper, the loss is a sum divided by s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.batch import Batch, BatchContext
from megatron.core.collectives import features_to_sequence, gather_from
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.embedding import Embedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, TPContext
from megatron.core.tensor_parallel.linear_spec import ColumnLinear
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.layer import HiddenDropout
from megatron.core.transformer.norm import build_norm

MULTI_TOKEN = "mtp.layers"
"""Prefix of the names of multi-token prediction modules. A module's full name consists of the prefix and the module's
index, for example "mtp.layers.0"."""


class LossSum(Protocol):
    """Signature of `megatron.core.models.gpt.gpt_model.GPTModel.loss_sum`."""

    def __call__(
        self, x: Tensor, labels: Tensor, mask: Tensor, factor: float = 1.0, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


def multi_token_projection(name: str, config: TransformerConfig) -> ColumnLinear:
    """Return the specification of the linear layer `eh_proj`, which maps the concatenation of normalized embeddings and
    normalized hidden states to hidden states."""
    return ColumnLinear(f"{name}.eh_proj", 2 * config.hidden_size, (config.hidden_size,), False)


class MultiTokenLayer(nn.Module):
    """Multi-token prediction module for one depth. `depth` is the index of the module and starts at 0.

    The module contains an MoE layer if the last layer of the model is an MoE layer. --mtp-layer-kind selects the
    attention window and the rotary embedding of the module's transformer layer.
    """

    def __init__(self, depth: int, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        name = f"{MULTI_TOKEN}.{depth}"
        size = config.hidden_size
        self.number = config.num_layers + depth
        self.tp, self.sequence_parallel = ctx.tp, ctx.sequence_parallel
        self.enorm = build_norm(f"{name}.enorm", size, config, ctx)
        self.hnorm = build_norm(f"{name}.hnorm", size, config, ctx)
        self.eh_proj = ColumnParallelLinear(multi_token_projection(name, config), ctx.of_layer(self.number))
        self.transformer = TransformerBlock(
            config,
            ctx,
            [self.number],
            first=True,
            final_norm=True,
            layer=f"{name}.transformer_layer",
            norm=f"{name}.final_layernorm",
        )

    def forward(self, hidden: Tensor, embedded: Tensor, context: BatchContext) -> Tensor:
        """Combine hidden states and embeddings, and run the transformer layer: hidden [s, b, h], embedded [s, b, h] ->
        hidden states [s, b, h]. Under sequence parallelism, the first dim of all three tensors is s/tp."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))  # [s, b, h/tp]
        x = features_to_sequence(x, self.tp) if self.sequence_parallel else gather_from(x, self.tp)
        return self.transformer(x, context)


class MultiTokenPrediction(nn.Module):
    """Multi-token prediction modules of all depths, and the sums of their losses over a step."""

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        depths = range(config.mtp_depths)
        self.layers = nn.ModuleList(MultiTokenLayer(depth, config, ctx) for depth in depths)
        names = (f"{MULTI_TOKEN}.{depth}.embedding.dropout" for depth in depths)
        self.dropouts = nn.ModuleList(HiddenDropout(name, config.hidden_dropout, ctx) for name in names)
        self.cp_size = ctx.state.cp.size
        self.weight = config.mtp_loss_scaling_factor / config.mtp_depths
        self.tally = torch.zeros(config.mtp_depths, 2, dtype=torch.float64, device=ctx.device)
        """Tensor [depths, 2] that contains, for each depth, the loss sum and the number of tokens that count,
        accumulated over the micro-batches of the step so far."""

    def forward(self, hidden: Tensor, batch: Batch, embedding: Embedding, loss_sum: LossSum) -> Tensor:
        """Return the weighted sum of the losses at all depths.

        Args:
            hidden: Hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism.
            batch: The micro-batch, whose `future_*` fields must be set.
            embedding: The model's embedding.
            loss_sum: Function that computes the loss sum from hidden states.
        """
        tokens = batch.future_tokens
        labels = batch.future_labels
        positions = batch.future_position_ids
        mask = batch.future_loss_mask
        assert tokens is not None and labels is not None and positions is not None and mask is not None
        context, sums = BatchContext.of(batch), []
        s = tokens.shape[1] * self.cp_size
        for k, (layer, dropout) in enumerate(zip(self.layers, self.dropouts, strict=True)):
            there = replace(context, position_ids=positions[..., k])
            embedded = dropout(embedding.vectors(tokens[..., k], there), context)
            hidden = layer(hidden, embedded, context)
            factor = self.weight * (s / (s - k - 1))
            found, _ = loss_sum(hidden, labels[..., k], mask[..., k], factor, batch.loss_seed)
            sums.append(found)
        losses = torch.stack(sums)
        self.tally.add_(torch.stack((losses.detach(), mask.sum((0, 1))), dim=1))
        return self.weight * torch.stack([each * (s / (s - k)) for k, each in enumerate(sums, 1)]).sum()
