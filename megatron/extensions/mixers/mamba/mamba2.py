"""Mamba-2 (arXiv 2405.21060, section 7), as in Nemotron-H and Megatron-LM.

One projection produces the gates, the inputs x, the vectors B and C, and the step sizes dt. A short convolution and
SiLU are applied to x, B and C. The state-space model, a recurrence over tokens, computes the head outputs. These
outputs are multiplied by the SiLU of the gates, normalized within each group of heads, and projected to hidden states.
Groups, together with their heads, are sharded over the tensor-parallel ranks.

Under context parallelism, one all-to-all exchanges sequence shards for groups. If there are fewer groups than ranks,
several ranks share a group: each of them receives a part of the group's heads, and the B and C of the group. A second
all-to-all restores the sequence shards of the outputs. Each rank computes the convolution and the recurrence over whole
sequences for its heads, so documents and chunks are the same as in a single process. The gates are not exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.collectives import local_slice
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, make_sharded_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.recompute import recomputed
from megatron.extensions.attention.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megatron.extensions.mixers.linear_attention.gated_delta_net import (
    FEW_TOKENS,
    documents_begun,
    last_rows,
    short_convolution,
)
from megatron.extensions.mixers.linear_attention.gated_delta_rule import Chunks
from megatron.extensions.mixers.mamba.flags import MambaFlags, group_channels, num_heads
from megatron.extensions.mixers.mamba.ssd import operands_in_chunks, ssd_chunks, ssd_of_chunks, ssd_steps

Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Operands x, dt, B and C of the state-space model; see `ssd_chunks`."""

OF_GROUP = (1, 2)
"""Positions of B and C in the sequence x, B, C, dt. All heads of a group share B and C."""


STEPS = Init("inverse_softplus", low=1e-3, high=0.1)
"""Initialization of dt_bias. The initial step sizes softplus(dt_bias) are log-uniform between `low` and `high`."""


class Mamba2(nn.Module):
    """Mamba-2 mixer: an input projection, a convolution, the state-space model, a gated norm, and an output projection.

    The weight of in_proj is [groups, channels, h]; `group_channels` describes the channels of each group. The backward
    pass recomputes the activations between the input projection and the gated norm."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own = config.options(MambaFlags)
        hidden = config.hidden_size
        channels = group_channels(config)
        heads = num_heads(config)
        groups = own.mamba_num_groups
        taps = own.mamba_conv_kernel_dim
        width, mixed = heads * own.mamba_head_dim, (groups, sum(channels[1:4]))
        within = Init("uniform", low=-(taps**-0.5), high=taps**-0.5)

        self.cp = ctx.state.cp
        self.layer = ctx.layer
        self.eps = config.norm_epsilon
        self.chunk = own.mamba_chunk_size
        self.min_step, self.factors = own.mamba_min_step_size, own.mamba_multipliers
        self.groups, self.head_dim = own.mamba_num_groups // ctx.tp.size, own.mamba_head_dim
        self.gates, *self.channels = channels
        # Names and initial values match Megatron-LM. The convolution is applied to the channels of x, B and C of each
        # group.
        self.conv_weight = make_sharded_parameter(f"{name}.conv1d.weight", (*mixed, taps), ctx, role="convolution")
        self.conv_bias = make_sharded_parameter(f"{name}.conv1d.bias", mixed, ctx, role="bias", init=within)
        self.dt_bias = make_sharded_parameter(f"{name}.dt_bias", (heads,), ctx, role="bias", init=STEPS)
        decays = Init("log_of_uniform", low=1.0, high=16.0)
        self.a_log = make_sharded_parameter(f"{name}.A_log", (heads,), ctx, role="vector", init=decays)
        """[heads], logarithms of the decay rates per unit of step size."""
        self.d = make_sharded_parameter(f"{name}.D", (heads,), ctx, role="vector", init=Init("ones"))
        """[heads], factors D. The inputs x, multiplied by D, are added to the outputs of the state-space model."""
        self.normed_first = own.mamba_norm_before_gate
        gain = (f"{name}.norm.weight", (width,), ctx)
        self.norm = make_sharded_parameter(*gain, role="norm", init=Init("ones")) if own.mamba_norm else None
        # The projections have no biases. With Muon, the optimizer that --muon-scalar-optimizer selects updates in_proj,
        # as in Megatron-LM.
        in_proj = ColumnLinear(f"{name}.in_proj", hidden, (groups, sum(channels)), False, role="packed")
        self.in_proj = column_parallel(in_proj, ctx)
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", width, hidden, False), ctx)
        self.hardware, self.with_input = ctx.hardware, region(with_input, ctx.compiled)
        self.prepare, self.gated = region(mamba_operands, ctx.compiled), region(gated_group_norm, ctx.compiled)
        self.prepare_chunks = region(mamba_operands_in_chunks, ctx.compiled)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s/cp, b, h], or [s/(cp*tp), b, h] under
        sequence parallelism."""
        projected = self._scaled(self.in_proj(x).unflatten(-1, (self.groups, -1)))
        gate, mixed = projected.split((self.gates, sum(self.channels)), dim=-1)
        mixed = sequence_to_heads(self._of_ranks(mixed, 2), self.cp)
        number = None if context.documents is None else documents_begun(context.documents, len(mixed), mixed.device)
        if context.cache is not None:
            y = self._behind_cache(mixed, context.cache)
        elif self.training:
            y = recomputed(self._mix, mixed, number)
        else:
            y = self._mix(mixed, number)
        y = heads_to_sequence(y, self.cp).flatten(2)  # y is now [s/cp, b, heads/tp * p]
        return self.out_proj(self.gated(y, gate, self.norm, self.eps, self.normed_first))

    def _scaled(self, projected: Tensor) -> Tensor:
        """Multiply the gates, x, B, C and dt in `projected` [s/cp, b, groups/tp, channels] by the factors in
        --mamba-multipliers."""
        if self.factors is None:
            return projected
        parts = projected.split((self.gates, *self.channels), dim=-1)
        return torch.cat([part * factor for part, factor in zip(parts, self.factors, strict=True)], dim=-1)

    def _of_ranks(self, x: Tensor, dim: int) -> Tensor:
        """Divide the groups and channels of x [..., groups/tp, channels, ...] among context-parallel ranks. Dimension
        `dim` of x contains the groups, and dimension `dim + 1` contains the channels of x, B, C and optionally dt. The
        result has a new dimension for the ranks, [..., cp, groups/(tp*cp), channels, ...]. If there are more ranks than
        groups, several ranks share a group, and the result is [..., cp, 1, channels of a rank, ...]."""
        parts = self.cp.size // self.groups
        if parts <= 1:
            return x.unflatten(dim, (self.cp.size, -1))
        split = x.split(self.channels[: 4 if x.shape[dim + 1] == sum(self.channels) else 3], dim + 1)
        own = [
            torch.stack([part] * parts, dim + 1) if place in OF_GROUP else part.unflatten(dim + 1, (parts, -1))
            for place, part in enumerate(split)
        ]
        return torch.cat(own, dim + 2).flatten(dim, dim + 1).unsqueeze(dim + 1)

    def _mix(self, mixed: Tensor, number: Tensor | None) -> Tensor:
        """Compute the head outputs [s, b, heads/(tp*cp) * p]. `mixed` [s, b, groups/(tp*cp), channels] contains the
        projected channels."""
        weights, (widths, dt_bias) = self._convolution(), self._widths_and_bias()
        chunk, decay = min(self.chunk, len(mixed)), self._decay()
        prepared = mixed, *weights, dt_bias, widths, self.min_step, number, None
        operands = self.prepare_chunks(prepared, decay, chunk)
        direct = local_slice(self.d, self.cp)
        y, _ = ssd_of_chunks(operands, number, None, self.hardware, direct, mixed.dtype)
        return (y if len(y) == len(mixed) else y[: len(mixed)]).flatten(2)

    def _behind_cache(self, mixed: Tensor, cache: EarlierTokens) -> Tensor:
        """Compute the head outputs of the new tokens during generation, and update the cache. For each layer, the cache
        contains the state and the last inputs of the convolution. Padding does not change the state."""
        before, state = cache.states(self.layer) or (None, None)
        before = None if before is None else before.transpose(0, 1)
        (x, dt, B, C), last = self._operands(mixed, None, before)
        if (lengths := cache.lengths) is not None:
            padding = torch.arange(len(mixed), device=mixed.device)[:, None, None] >= lengths[:, None]
            dt = dt.masked_fill(padding, 0.0)
            last = last_rows(mixed[..., : last.shape[-1]], before, lengths, len(last))
        if len(mixed) <= FEW_TOKENS:
            y, state = ssd_steps(x, dt, self._decay(), B, C, None, state)
        else:
            y, state = ssd_chunks(x, dt, self._decay(), B, C, None, state, Chunks(self.chunk))
        cache.set_states(self.layer, last.transpose(0, 1), state)
        return self.with_input(y, x, local_slice(self.d, self.cp))

    def _operands(self, mixed: Tensor, number: Tensor | None, before: Tensor | None) -> tuple[Operands, Tensor]:
        """Compute the operands of the state-space model from the projected channels `mixed`. Return the operands, and
        the last inputs of the convolution."""
        widths, dt_bias = self._widths_and_bias()
        return self.prepare(mixed, *self._convolution(), dt_bias, widths, self.min_step, number, before)

    def _convolution(self) -> tuple[Tensor, Tensor]:
        """Return the shards of the convolution's weight and bias for the channels of this context-parallel rank."""
        weight, bias = (self._of_ranks(each, 0)[self.cp.rank] for each in (self.conv_weight, self.conv_bias))
        return weight, bias

    def _widths_and_bias(self) -> tuple[tuple[int, int, int], Tensor]:
        """Return three numbers of channels on this context-parallel rank, and the rank's shard of the step size bias.
        The numbers are the channels of x per group, the channels of B per group, and the channels of x per head."""
        parts = max(1, self.cp.size // self.groups)
        widths = self.channels[0] // parts, self.channels[1], self.head_dim
        return widths, local_slice(self.dt_bias, self.cp)

    def _decay(self) -> Tensor:
        """Return the decay rates [heads/(tp*cp)] per unit of step size, as negative numbers."""
        a_log = local_slice(self.a_log, self.cp)
        return -a_log.to(torch.promote_types(a_log.dtype, torch.float32)).exp()


def with_input(y: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Return the sum y + d x [s, b, heads * p] in the dtype of x."""
    return (y + d.to(y.dtype).unsqueeze(-1) * x).to(x.dtype).flatten(2)


def mamba_operands(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    widths: tuple[int, int, int],
    min_step: float,
    number: Tensor | None,
    before: Tensor | None,
) -> tuple[Operands, Tensor]:
    """Return the operands of the state-space model, and the last inputs of the convolution.

    The step sizes dt are fp32 even if the other operands are 16-bit, because they are summed over tokens.

    Args:
        mixed: [s, b, groups, channels], projected x, B and C, and one dt per head.
        weight: [groups, channels of x, B and C, taps], weight of the convolution.
        bias: [groups, channels of x, B and C], bias of the convolution.
        dt_bias: [heads], bias of the step sizes.
        widths: Three numbers of channels: of x per group, of B per group, and of x per head.
        min_step: Lower bound of step sizes.
        number: [s, b], index of each token's document within its sample, from 0; None if there is only one document.
        before: [taps - 1, b, groups, channels of x, B and C], earlier inputs of the convolution; None for zeros.
    """
    inputs, state, head = widths
    mixed, dt = mixed.split((inputs + 2 * state, mixed.shape[-1] - inputs - 2 * state), dim=-1)
    y, last = short_convolution(mixed, weight, number, before)
    y = F.silu(y + bias.to(y.dtype)).to(mixed.dtype)
    x, B, C = y.split((inputs, state, state), dim=-1)
    wide = torch.promote_types(mixed.dtype, torch.float32)
    dt = F.softplus(dt.flatten(2).to(wide) + dt_bias.to(wide))
    dt = dt.clamp(min=min_step) if min_step else dt
    return (x.unflatten(-1, (-1, head)).flatten(2, 3), dt, B, C), last


def mamba_operands_in_chunks(prepared: tuple[Any, ...], decay: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Compute the operands with `mamba_operands(*prepared)`, and divide them into chunks with `operands_in_chunks`."""
    (x, dt, B, C), _ = mamba_operands(*prepared)
    return operands_in_chunks(x, dt, decay, B, C, chunk)


def gated_group_norm(y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, normed_first: bool = False) -> Tensor:
    """Multiply y by the SiLU of the gates, and apply RMSNorm over the channels of each group. For 16-bit inputs,
    intermediate results are fp32.

    Args:
        y: [s, b, groups * c], tensor to normalize.
        gate: [s, b, groups, c], gates before SiLU.
        weight: [groups * c], norm weight; None for no norm.
        eps: Epsilon of the norm.
        normed_first: Whether to apply the norm before the multiplication by the gates instead of after it.

    Returns:
        The gated and normalized tensor [s, b, groups * c] in the dtype of `gate`.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    y, gate_function = y.view(gate.shape).to(wide), F.silu(gate.to(wide))
    y = y if normed_first and weight is not None else y * gate_function
    if weight is not None:
        y = F.rms_norm(y, gate.shape[-1:], None, eps) * weight.to(wide).view(gate.shape[-2:])
        y = y * gate_function if normed_first else y
    return y.flatten(2).to(gate.dtype)
