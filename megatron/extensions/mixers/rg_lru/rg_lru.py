"""RG-LRU, the real-gated linear recurrent unit of Griffin (arXiv 2402.19427, section 2.4).

One projection produces the inputs and output gates of each channel. A depthwise causal convolution is applied to the
inputs. Two gates, the input gate i and the recurrence gate r, are computed from the convolution output x, separately
for each block of channels. The state h of each channel is computed by the recurrence

    decay:  a_t = exp(-8 softplus(L) r_t)
    state:  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t

At the first token of each document, the previous state is discarded, and the square root is replaced with 1. The
product of h and the GeLU of the output gates is projected to hidden states. Blocks are sharded over the tensor-parallel
ranks. Under context parallelism, an all-to-all before the convolution exchanges sequence shards for blocks, so that
each rank has the whole sequence for some of the blocks. A second all-to-all converts the outputs back to sequence
shards. The output gates are not exchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import EarlierTokens
from megatron.core.collectives import local_slice
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, make_sharded_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.activations import gelu_tanh
from megatron.extensions.attention.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megatron.extensions.mixers.linear_attention.gated_delta_net import last_rows
from megatron.extensions.mixers.mamba1.selective_scan import adjoint, recurrence
from megatron.extensions.mixers.rg_lru.flags import RgLruFlags, shape_of
from megatron.extensions.mixers.short_convolution.short_convolution import BetweenProjections, convolved

SHARPNESS = 8.0
"""Constant factor 8 in the formula for the log decay, log a_t."""

STEEPEST = 1000.0
"""Upper bound of the derivative of the square root in sqrt(1 - a_t^2). Without a bound, the derivative would be
infinite at 0."""


class RgLru(BetweenProjections):
    """RG-LRU layer: an input projection, a convolution, the gated recurrence, output gates, and an output
    projection."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        (blocks, width) = shape_of(config)
        taps = config.options(RgLruFlags).rg_lru_conv_kernel_dim
        hidden = config.hidden_size
        self.cp = ctx.state.cp
        self.layer = ctx.layer
        self.width = width
        channels = blocks * width
        of_taps, of_gates = (Init("normal", (0.01 / size) ** 0.5) for size in (taps, width))

        self.conv_weight = make_sharded_parameter(
            f"{name}.conv1d.weight", (channels, 1, taps), ctx, role="convolution", init=of_taps
        )
        self.conv_bias = make_sharded_parameter(f"{name}.conv1d.bias", (channels,), ctx, role="bias")
        self.gates = nn.ParameterList()
        for gate in ("input_gate", "recurrent_gate"):
            weight = (f"{name}.{gate}.weight", (blocks, width, width), ctx)
            self.gates.append(make_sharded_parameter(*weight, role="hidden", init=of_gates, stacked=1))
            self.gates.append(make_sharded_parameter(f"{name}.{gate}.bias", (blocks, width), ctx, role="bias"))
        # initial decay rates softplus(L): if the gate r_t is 1/8, the decay a_t of a token is between 0.9 and 0.999
        decays = Init("inverse_softplus", low=1e-3, high=0.105)
        self.decay = make_sharded_parameter(f"{name}.recurrent_param", (channels,), ctx, role="vector", init=decays)
        """[channels], parameter L. The decay rates are softplus(L)."""
        # The outputs of in_proj are the output gates and the inputs.
        self.in_proj = column_parallel(ColumnLinear(f"{name}.in_proj", hidden, (2, channels), True, shard_dim=1), ctx)
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", channels, hidden, True), ctx)
        self.convolved, self.gated = region(convolved, ctx.compiled), region(gated_inputs, ctx.compiled)

    def _mix(self, mixed: Tensor, number: Tensor | None, cache: EarlierTokens | None) -> Tensor:
        """Compute the gated outputs [s/cp, b, channels/tp]. `mixed` [s/cp, b, 2 * channels/tp] contains the projected
        gates and inputs."""
        gate, x = mixed.unflatten(-1, (2, -1)).unbind(-2)
        x = sequence_to_heads(x.unflatten(-1, (self.cp.size, -1)), self.cp)  # [s, b, channels/(tp*cp)]
        before, state = (None if cache is None else cache.states(self.layer)) or (None, None)
        before = None if before is None else before.transpose(0, 1)
        weight, bias, decay, of_input, input_bias, of_state, state_bias = (
            local_slice(each, self.cp) for each in (self.conv_weight, self.conv_bias, self.decay, *self.gates)
        )
        u, last = self.convolved(x, weight, bias, number, before)
        begins = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        begins[0] = state is None
        if number is not None:
            begins[1:] |= number[1:] != number[:-1]
        i, r = (
            torch.einsum("sbgi,gio->sbgo", u.unflatten(-1, (-1, self.width)), gate) for gate in (of_input, of_state)
        )
        kept, written = self.gated(u, i, r, input_bias, state_bias, decay, begins)
        if cache is not None and (lengths := cache.lengths) is not None:  # padding does not change the state
            padding = torch.arange(len(x), device=x.device)[:, None, None] >= lengths[:, None]
            kept, written = kept.masked_fill(padding, 1.0), written.masked_fill(padding, 0.0)
            last = last_rows(x, before, lengths, len(last))
        h = _Recurrence.apply(kept, written, torch.zeros_like(written[0]) if state is None else state)
        if cache is not None:
            cache.set_states(self.layer, last.transpose(0, 1), h[-1])
        return heads_to_sequence(h.to(x.dtype), self.cp).flatten(2) * gelu_tanh(gate)


def gated_inputs(
    u: Tensor, i: Tensor, r: Tensor, input_bias: Tensor, state_bias: Tensor, decay: Tensor, begins: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two tensors [s, b, c] in fp32 or wider: the decay a_t of each token, and the term that each token adds to
    the state.

    Args:
        u: [s, b, c], inputs.
        i: [s, b, blocks, w], projected input gates, before bias and sigmoid.
        r: [s, b, blocks, w], projected recurrence gates, before bias and sigmoid.
        input_bias: [blocks, w], bias of input gates.
        state_bias: [blocks, w], bias of recurrence gates.
        decay: [c], parameter L; the decay rates are softplus(L).
        begins: [s, b], True for the first token of each document.
    """
    wide, first = torch.promote_types(u.dtype, torch.float32), begins.unsqueeze(-1)
    of_input, of_state = (
        (gate.to(wide) + bias.to(wide)).sigmoid().flatten(2) for gate, bias in ((i, input_bias), (r, state_bias))
    )
    log_kept = -SHARPNESS * of_state * F.softplus(decay.to(wide))
    scale = bounded_root(-torch.expm1(2 * log_kept)).masked_fill(first, 1.0)
    return log_kept.exp().masked_fill(first, 0.0), u.to(wide) * of_input * scale


def bounded_root(x: Tensor) -> Tensor:
    """Return the square root of x. In the backward pass, the derivative of the square root is at most `STEEPEST`."""
    value = x.detach()
    return value.sqrt() + (x - value) * (4 * value).clamp(min=STEEPEST**-2).rsqrt()


class _Recurrence(torch.autograd.Function):
    """Autograd function of `recurrence`. Only the decays, the states h and the initial state are saved for the backward
    pass."""

    @staticmethod
    def forward(ctx: AutogradContext, decay: Tensor, written: Tensor, state: Tensor) -> Tensor:
        h = recurrence(decay, written, state)
        ctx.save_for_backward(decay, h, state)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, ...]:
        decay, h, state = ctx.saved_tensors
        of_written = adjoint(decay, grad)
        of_decay = of_written * torch.cat((state.unsqueeze(0), h[:-1]))
        return of_decay, of_written, of_written[0] * decay[0]
