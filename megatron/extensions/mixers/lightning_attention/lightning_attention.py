"""Lightning attention (arXiv 2401.04658), the mixer of MiniMax-Text-01 (arXiv 2501.08313, section 2.2).

One projection produces queries, keys, values and gates. SiLU is applied to queries, keys and values, and attention is
computed without a softmax. The outputs of all heads are normalized together, multiplied by the sigmoid of the gates,
and projected to hidden states. Each head has a state S, which decays at a fixed rate:

    state:   S_t = exp(-rate) S_{t-1} + k_t v_tᵀ
    output:  y_t = S_tᵀ q_t

This recurrence is the state-space model of Mamba-2 with step sizes of 1, keys as B, queries as C and values as inputs.
`ssd.py` therefore computes lightning attention in chunks by matrix products. Heads are sharded over the tensor-parallel
ranks. Under context parallelism, an all-to-all before the recurrence exchanges sequence shards for heads, and a second
all-to-all restores the sequence shards of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import HARDWARE, TPContext, column_parallel, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.norm import WideRMSNorm
from megatron.core.transformer.recompute import recomputed
from megatron.extensions.attention.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megatron.extensions.mixers.lightning_attention.flags import LightningFlags
from megatron.extensions.mixers.linear_attention.gated_delta_net import FEW_TOKENS, documents_begun
from megatron.extensions.mixers.linear_attention.gated_delta_rule import Chunks
from megatron.extensions.mixers.mamba.ssd import ssd_chunks, ssd_steps

EPSILON = 1e-6
"""Epsilon of the output norm. As in MiniMax-Text-01, this value is fixed and does not depend on --norm-epsilon."""


class LightningAttention(nn.Module):
    """Lightning attention: an input projection, linear attention, a norm, gates, and an output projection. The backward
    pass recomputes all activations between the input projection and the output projection, except for the head
    outputs."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        heads = config.num_attention_heads
        width = config.head_dim
        hidden = config.hidden_size
        of_heads = replace(config, qk_layernorm_scope="all", norm_epsilon=EPSILON)
        self.cp = ctx.state.cp
        self.layer = ctx.layer
        self.width = config.head_dim
        self.hardware = ctx.hardware
        self.chunk, self.heads = config.options(LightningFlags).lightning_chunk_size, heads // ctx.tp.size
        first = ctx.tp.rank * self.heads + self.cp.rank * (self.heads // self.cp.size)
        self.rates = partial(decay_rates, range(first, first + self.heads // self.cp.size), ctx.layer, config)
        # The rows of each head in in_proj produce its query, key, value and gate. The projections have no biases.
        self.in_proj = column_parallel(ColumnLinear(f"{name}.in_proj", hidden, (heads, 4 * width), False), ctx)
        self.norm = WideRMSNorm(f"{name}.norm", heads, of_heads, ctx)
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", heads * width, hidden, False), ctx)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s/cp, b, h], or [s/(cp*tp), b, h] under
        sequence parallelism."""
        mixed = self.in_proj(x).unflatten(-1, (self.heads, 4 * self.width))
        mixed, gate = mixed.split((3 * self.width, self.width), dim=-1)
        mixed = sequence_to_heads(mixed.unflatten(2, (self.cp.size, -1)), self.cp)
        documents, again = context.documents, self.training and context.cache is None
        number = None if documents is None else documents_begun(documents, len(mixed), mixed.device)
        y = recomputed(self._mix, mixed, number, None) if again else self._mix(mixed, number, context.cache)
        y = heads_to_sequence(y, self.cp).flatten(2, 3)  # y is now [s/cp, b, heads/tp, channels]
        return self.out_proj(recomputed(self._gated, y, gate) if again else self._gated(y, gate))

    def _mix(self, mixed: Tensor, number: Tensor | None, cache: EarlierTokens | None) -> Tensor:
        """Compute the head outputs [s, b, heads/(tp*cp), channels]. `mixed` [s, b, heads/(tp*cp), 3 * channels]
        contains the projected queries, keys and values."""
        q, k, v = F.silu(mixed).chunk(3, dim=-1)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        rule: Callable[..., tuple[Tensor, Tensor]] = partial(
            ssd_chunks, chunks=Chunks(self.chunk, HARDWARE if cache is not None else self.hardware)
        )
        steps, state = mixed.new_ones(mixed.shape[:3], dtype=wide), None
        if cache is not None:
            (state,) = cache.states(self.layer) or (None,)
            rule = ssd_steps if len(mixed) <= FEW_TOKENS else rule
            if cache.lengths is not None:  # a token with a step size of 0 does not change the state
                padding = torch.arange(len(mixed), device=mixed.device)[:, None, None] >= cache.lengths[:, None]
                steps = steps.masked_fill(padding, 0.0)
        y, state = rule(v, steps, -self.rates(wide, mixed.device), k, q, number, state)
        if cache is not None:
            cache.set_states(self.layer, state)
        return y.to(mixed.dtype)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalize y and multiply the result by the sigmoid of the gate. y and gate are [s/cp, b, heads/tp, channels];
        the result is [s/cp, b, heads/tp * channels]."""
        return (self.norm(y) * gate.sigmoid()).flatten(2)


def decay_rates(
    heads: range, layer: int, config: TransformerConfig, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the decay rates [n] of the heads in `heads`. In the first layer of a model with 8 heads, the rates are the
    slopes of ALiBi, from 1/2 to 1/256. In later layers, the rates are lower; in the last layer, they are nearly 0.

    Args:
        heads: Indices of the heads.
        layer: Layer number. Layers of multi-token prediction modules use the rates of the model's last layer.
        config: Model configuration.
        dtype: Dtype of the result.
        device: Device of the result.
    """
    last = config.num_layers - 1
    of_layer = 1 - min(layer, last) / (last + 1e-5) + 1e-5
    numbers = torch.arange(heads.start + 1, heads.stop + 1, dtype=dtype, device=device)
    return torch.exp2(numbers * (-8 / config.num_attention_heads)) * of_layer
