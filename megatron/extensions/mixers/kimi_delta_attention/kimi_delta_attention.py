"""Kimi Delta Attention (arXiv 2510.26692), the mixer of Kimi Linear.

Kimi Delta Attention is a gated delta net with a separate decay for each channel of the state. The decays and the output
gates are computed by low-rank projections, each of which consists of two matrices. The first matrix is replicated on
all tensor-parallel ranks. In Ling 3.0, a single full-rank matrix replaces the two matrices. The head outputs are
multiplied by the sigmoid of the gates. Everything else is the same as in `GatedDeltaNet` with one value head per key
head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.collectives import local_slice
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import (
    ReplicatedParallelLinear,
    TPContext,
    column_parallel,
    make_parameter,
    make_sharded_parameter,
    row_parallel,
)
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, ReplicatedLinear, RowLinear
from megatron.core.transformer.norm import HEAD_NORM_PARTIAL_OVER
from megatron.extensions.mixers.kimi_delta_attention.flags import KimiDeltaFlags
from megatron.extensions.mixers.linear_attention.gated_delta_net import (
    DeltaRows,
    DeltaWeights,
    GatedDeltaNet,
    Operands,
    delta_operands,
)


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention: projections, a convolution, the gated delta rule with one decay per channel, a gated norm,
    and an output projection.

    The weight of in_proj is [heads, 3 * channels + 1, h]. The rows of each head produce its query, key, value and write
    strength."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        # The base class's __init__ is skipped, because it would create parameters that this class does not use.
        nn.Module.__init__(self)
        own, hidden = config.options(KimiDeltaFlags), config.hidden_size
        heads, taps = own.kda_num_heads, own.kda_conv_kernel_dim
        self.cp = ctx.state.cp
        self.layer = ctx.layer
        self.eps = config.norm_epsilon
        width = own.kda_head_dim
        self.channels = (width, width, width, width, 1, width)
        self.value_width = width
        self.rows = DeltaRows((width, width), least_decay=own.kda_decay_lower_bound)
        steps, decays = Init("inverse_softplus", low=1e-3, high=0.1), Init("log_of_uniform", low=1.0, high=16.0)

        def down(of: str) -> nn.Module:
            linear = ReplicatedLinear(f"{name}.{of}_a_proj", hidden, width, False)
            return nn.Identity() if own.kda_full_rank_gates else ReplicatedParallelLinear(linear, ctx)

        def up(of: str) -> nn.Module:
            part, inputs = (f"{of}_proj", hidden) if own.kda_full_rank_gates else (f"{of}_b_proj", width)
            return column_parallel(ColumnLinear(f"{name}.{part}", inputs, (heads, width), False), ctx)

        # Initial values match Hugging Face's implementation. The projections have no biases.
        in_proj = ColumnLinear(f"{name}.in_proj", hidden, (heads, 3 * width + 1), False)
        self.in_proj = column_parallel(in_proj, ctx)
        self.f_a_proj, self.g_a_proj = down("f"), down("g")  # low-rank projections: f for decays, g for output gates
        self.f_b_proj, self.g_b_proj = up("f"), up("g")
        self.conv1d = make_sharded_parameter(f"{name}.conv1d.weight", (heads, 3 * width, taps), ctx, role="convolution")
        self.dt_bias = make_sharded_parameter(f"{name}.dt_bias", (heads, width), ctx, role="bias", init=steps)
        """[heads, channels], biases that are added to the projected decays."""
        self.a_log = make_sharded_parameter(f"{name}.A_log", (heads,), ctx, role="vector", init=decays)
        """[heads], logarithms of the decay rates."""
        out_norm = ParamMeta(f"{name}.out_norm.weight", (width,), {}, Init("ones"), HEAD_NORM_PARTIAL_OVER, role="norm")
        self.out_norm = make_parameter(out_norm, ctx)
        """[channels], weight of the output norm, which all heads share."""
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", heads * width, hidden, False), ctx)
        self.kernel = None
        self.recompute = True
        self.hardware = ctx.hardware
        self.prepare, self.gated = region(delta_operands, ctx.compiled), region(sigmoid_gated_norm, ctx.compiled)

    def _projected(self, x: Tensor) -> Tensor:
        """Project x to [s/cp, b, heads/tp * channels]. The channels of each head are its query, key, value, output
        gate, write strength and decays."""
        width = self.value_width
        mixed, gate = self.in_proj(x).unflatten(-1, (-1, 3 * width + 1)), self.g_b_proj(self.g_a_proj(x))
        decay = self.f_b_proj(self.f_a_proj(x))
        qkv, beta = mixed.split((3 * width, 1), dim=-1)
        parts = qkv, gate.unflatten(-1, (-1, width)), beta, decay.unflatten(-1, (-1, width))
        return torch.cat(parts, dim=-1).flatten(2)

    def _operands(self, mixed: Tensor, number: Tensor | None, before: Tensor | None) -> tuple[Operands, Tensor, Tensor]:
        width = self.value_width
        inputs, gate, beta, decay = mixed.split((3 * width, width, 1, width), dim=-1)
        conv1d, dt_bias, a_log = (local_slice(weight, self.cp) for weight in (self.conv1d, self.dt_bias, self.a_log))
        weights = DeltaWeights(conv1d, dt_bias, a_log.unsqueeze(-1))
        operands, before = self.prepare(inputs, beta.flatten(2), decay, weights, self.rows, number, before)
        return operands, gate, before


def sigmoid_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to the output of each head, and multiply the result by the sigmoid of the head's gate. For 16-bit
    inputs, intermediate results are fp32.

    Args:
        x: [s, b, heads, d], head outputs.
        gate: [s, b, heads, d], gates before the sigmoid.
        weight: [d], norm weight, shared by all heads.
        eps: Epsilon of the norm.

    Returns:
        The gated and normalized head outputs [s, b, heads * d] in the dtype of `gate`.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps) * gate.to(wide).sigmoid()
    return y.to(gate.dtype).flatten(2)
