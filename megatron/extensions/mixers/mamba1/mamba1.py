"""Mamba-1 (arXiv 2312.00752, section 3.4).

One projection produces the inputs x and gates of each channel. A depthwise causal convolution and SiLU are applied to
x. A second projection maps all channels to B, C and a low-rank vector. A third projection maps the low-rank vector to
the step sizes of the channels. The selective scan, a recurrence over tokens, computes the outputs. The output of the
scan, multiplied by the SiLU of the gates, is projected to hidden states.

Channels are sharded over the tensor-parallel ranks. B, C and the low-rank vector depend on all channels and are
therefore summed over the tensor-parallel ranks. Under context parallelism, one all-to-all exchanges sequence shards for
channels, and a second all-to-all restores the sequence shards of the outputs. Each rank computes the convolution and
the scan over whole sequences for its channels. The gates are not exchanged.
"""

from __future__ import annotations

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import EarlierTokens
from megatron.core.collectives import copy_to, local_slice, reduce_from
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import (
    TPContext,
    column_parallel,
    make_parameter,
    make_sharded_parameter,
    row_parallel,
)
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.extensions.attention.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megatron.extensions.mixers.linear_attention.gated_delta_net import last_rows
from megatron.extensions.mixers.mamba1.flags import Mamba1Flags, channels_of, low_rank_widths
from megatron.extensions.mixers.mamba1.selective_scan import selective_scan
from megatron.extensions.mixers.short_convolution.short_convolution import BetweenProjections, convolved


class Mamba1(BetweenProjections):
    """Mamba-1 mixer: an input projection, a convolution, the selective scan, gates, and an output projection."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own = config.options(Mamba1Flags)
        hidden = config.hidden_size
        channels = channels_of(config)
        self.cp = ctx.state.cp
        self.tp = ctx.tp
        self.layer = ctx.layer
        self.widths = low_rank_widths(config)
        (rank, states, _), taps = self.widths, own.mamba1_conv_kernel_dim
        of_taps, of_rank = (Init("uniform", low=-(size**-0.5), high=size**-0.5) for size in (taps, rank))
        decays = Init("constant", value=tuple(log(number) for number in range(1, states + 1)))

        self.norm, self.eps = own.mamba1_norm, own.mamba1_norm_epsilon or config.norm_epsilon
        # Names and initial values match the reference implementation of Mamba.
        self.conv_weight = make_sharded_parameter(f"{name}.conv1d.weight", (channels, 1, taps), ctx, role="convolution")
        self.conv_bias = make_sharded_parameter(f"{name}.conv1d.bias", (channels,), ctx, role="bias", init=of_taps)
        x_proj = ParamMeta(f"{name}.x_proj.weight", (sum(self.widths), channels), {"tp": 1}, role="hidden")
        self.x_proj = make_parameter(x_proj, ctx)
        """Weight of the projection that produces the low-rank step sizes, B and C."""
        self.dt_weight = make_sharded_parameter(
            f"{name}.dt_proj.weight", (channels, rank), ctx, role="hidden", init=of_rank
        )
        steps = Init("inverse_softplus", low=1e-3, high=0.1)
        self.dt_bias = make_sharded_parameter(f"{name}.dt_proj.bias", (channels,), ctx, role="bias", init=steps)
        self.a_log = make_sharded_parameter(f"{name}.A_log", (channels * states,), ctx, role="vector", init=decays)
        """[channels * states], logarithms of the decay rates per unit of step size. The parameter is one-dimensional,
        so that optimizers do not treat it as a matrix and do not apply weight decay to it."""
        self.d = make_sharded_parameter(f"{name}.D", (channels,), ctx, role="vector", init=Init("ones"))
        """[channels], factors D. The inputs of the scan, multiplied by D, are added to the outputs of the scan."""
        norms = zip(("dt", "b", "c"), self.widths if own.mamba1_norm == "weighted" else (), strict=False)
        self.norms = nn.ParameterList(
            make_parameter(ParamMeta(f"{name}.{of}_layernorm.weight", (width,), {}, Init("ones"), role="norm"), ctx)
            for of, width in norms
        )
        # The outputs of in_proj are the inputs and the gates.
        in_proj = ColumnLinear(f"{name}.in_proj", hidden, (2, channels), False, shard_dim=1)
        self.in_proj = column_parallel(in_proj, ctx)
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", channels, hidden, False), ctx)
        self.convolved = region(convolved, ctx.compiled)

    def _mix(self, mixed: Tensor, number: Tensor | None, cache: EarlierTokens | None) -> Tensor:
        """Compute the gated outputs [s/cp, b, channels/tp]. `mixed` [s/cp, b, 2 * channels/tp] contains the projected
        inputs and gates."""
        x, gate = mixed.unflatten(-1, (2, -1)).unbind(-2)
        x = sequence_to_heads(x.unflatten(-1, (self.cp.size, -1)), self.cp)  # [s, b, channels/(tp*cp)]
        before, state = (None if cache is None else cache.states(self.layer)) or (None, None)
        before = None if before is None else before.transpose(0, 1)
        u, last = self.convolved(x, self._own(self.conv_weight), self._own(self.conv_bias), number, before)
        u = F.silu(u)
        dt, B, C = self._steps(u)
        # A token with a step size of 0 does not change the state.
        if cache is not None and (lengths := cache.lengths) is not None:
            dt = dt.masked_fill(torch.arange(len(x), device=x.device)[:, None, None] >= lengths[:, None], 0.0)
            last = last_rows(x, before, lengths, len(last))
        rates = -self._own(self.a_log).to(dt.dtype).exp().view(-1, self.widths[-1])
        y, state = selective_scan(u, dt, rates, B, C, number, state)
        if cache is not None:
            cache.set_states(self.layer, last.transpose(0, 1), state)
        y = (y + self._own(self.d).to(y.dtype) * u).to(x.dtype)
        return heads_to_sequence(y, self.cp).flatten(2) * F.silu(gate)

    def _own(self, parameter: Tensor, dim: int = 0) -> Tensor:
        """Return the slice of a parameter for the channels of this context-parallel rank."""
        return local_slice(parameter, self.cp, dim)

    def _steps(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors that are computed from the inputs u: the step sizes [s, b, channels/(tp*cp)] in fp32 or
        wider, B [s, b, states], and C [s, b, states].

        B, C and the low-rank step sizes are sums over all channels, and therefore must be summed over the tensor- and
        context-parallel ranks. In the backward pass, each rank computes only a partial gradient of B, C, the low-rank
        step sizes and the norm weights. The gradients of the norm weights are summed over context-parallel ranks
        together with the sum over data-parallel ranks.
        """
        sums = reduce_from(reduce_from(F.linear(u, self._own(self.x_proj, 1)), self.tp), self.cp)
        parts = copy_to(sums, self.cp).split(self.widths, dim=-1)
        if self.norm != "none":
            weights = self.norms if self.norm == "weighted" else (None, None, None)
            parts = tuple(_rms_norm(part, weight, self.eps) for part, weight in zip(parts, weights, strict=True))
        step, B, C = copy_to(torch.cat(parts, dim=-1), self.tp).split(self.widths, dim=-1)
        wide = torch.promote_types(u.dtype, torch.float32)
        dt = F.linear(step, self._own(self.dt_weight)).to(wide) + self._own(self.dt_bias).to(wide)
        return F.softplus(dt), B, C


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMSNorm of x. 16-bit inputs are normalized in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], None if weight is None else weight.to(wide), eps).to(x.dtype)
