"""Gated delta net (arXiv 2412.06464, section 3.4), the linear attention of Qwen3-Next.

One projection produces queries, keys, values, gates, write strengths and decays. A short convolution and SiLU are
applied to queries, keys and values, and queries and keys are normalized. The gated delta rule, a recurrence over
tokens, computes the head outputs. Each head's output is normalized, multiplied by the head's gate and projected to
hidden states. Key heads, together with their value heads, are sharded over the tensor-parallel ranks.

Under context parallelism, an all-to-all before the convolution exchanges sequence shards for key heads, so that each
rank has the whole sequence for some of the key heads. A second all-to-all converts the outputs back to sequence shards.
--cp-comm-type has no effect on gated delta nets. Each rank computes the convolution and the recurrence over whole
sequences for its heads. The convolution, the document borders, the chunks and the kernels are therefore the same as in
a single process, and all ranks compute at the same time. If the ranks instead passed the state from one sequence shard
to the next, the ranks would have to compute one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.attention.tiles import Documents
from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.collectives import local_slice
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.host_to_device import copied_to
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import (
    TPContext,
    column_parallel,
    make_parameter,
    make_sharded_parameter,
    row_parallel,
)
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.norm import HEAD_NORM_PARTIAL_OVER
from megatron.core.transformer.recompute import recomputed
from megatron.extensions.attention.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megatron.extensions.mixers.linear_attention.flags import LinearAttentionFlags
from megatron.extensions.mixers.linear_attention.gated_delta_rule import (
    CHUNK,
    Chunks,
    flash_rule,
    gated_delta_chunks,
    gated_delta_steps,
)

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Operands of the gated delta rule: q, k, v, g and beta."""

FEW_TOKENS = 4
"""Largest number of new tokens for which generation applies the recurrence token by token. For so few tokens, this
takes fewer operations than the chunked form."""


class GatedDeltaNet(nn.Module):
    """Gated delta net: an input projection, a convolution, the gated delta rule, a gated norm, and an output
    projection.

    The weight of in_proj is [key heads, channels, h]; `linear_channels` describes the channels of each key head. The
    output of in_proj is saved for the backward pass, which recomputes all activations between in_proj and the output
    projection. If a kernel of flash-linear-attention computes the gated delta rule, these activations are recomputed
    only with `--recompute-modules core_attn`, and saved otherwise."""

    steps = 1
    """Number of key-value pairs that each token writes to the state. Each pair is one row in the operands of the gated
    delta rule; see `in_steps`."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own, hidden = config.options(LinearAttentionFlags), config.hidden_size
        groups = own.linear_num_key_heads
        heads = own.linear_num_value_heads
        taps = own.linear_conv_kernel_dim
        self.cp = ctx.state.cp
        self.layer = ctx.layer
        self.channels = own.linear_channels
        self.eps = own.linear_norm_epsilon or config.norm_epsilon
        self.strength = 2.0 if own.linear_allow_neg_eigval else 1.0
        self.value_width, self.steps = own.linear_value_head_dim, own.linear_num_householder
        self.widths = own.linear_key_head_dim, self.value_width

        # Names and initial values match Megatron-LM (arXiv 2412.06464, section 3.4). The projections have no biases.
        in_proj = ColumnLinear(f"{name}.in_proj", hidden, (groups, sum(self.channels)), False)
        self.in_proj = column_parallel(in_proj, ctx)
        self.conv1d = make_sharded_parameter(
            f"{name}.conv1d.weight", (groups, sum(self.channels[:3]), taps), ctx, role="convolution"
        )
        """[key heads, channels, taps], weight of the convolution. The channels of each key head are its query, its keys
        and its values."""
        self.dt_bias = make_sharded_parameter(f"{name}.dt_bias", (heads,), ctx, role="bias", init=Init("ones"))
        """[value heads], biases that are added to the projected decays."""
        decays = Init("log_of_uniform", low=1.0, high=16.0)
        self.a_log = make_sharded_parameter(f"{name}.A_log", (heads,), ctx, role="vector", init=decays)
        """[value heads], logarithms of the decay rates."""
        out_norm = ParamMeta(
            f"{name}.out_norm.weight", (self.value_width,), {}, Init("ones"), HEAD_NORM_PARTIAL_OVER, role="norm"
        )
        self.out_norm = make_parameter(out_norm, ctx)
        """[channels of a value head], weight of the output norm, which all heads share."""
        out_proj = RowLinear(f"{name}.out_proj", heads * self.value_width, hidden, False)
        self.out_proj = row_parallel(out_proj, ctx)
        self.kernel, self.hardware = flash_rule(ctx.dtype, ctx.device), ctx.hardware
        self.recompute = self.kernel is None or config.recomputes("core_attn")
        self.prepare, self.gated = region(delta_operands, ctx.compiled), region(gated_norm, ctx.compiled)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s/cp, b, h], or [s/(cp*tp), b, h] under
        sequence parallelism."""
        mixed = self._projected(x).unflatten(-1, (self.cp.size, -1, sum(self.channels)))
        mixed = sequence_to_heads(mixed, self.cp)
        number = None if context.documents is None else documents_begun(context.documents, len(mixed), mixed.device)
        if context.cache is not None:
            out = self._behind_cache(mixed, context.cache)
        elif self.recompute and self.training:
            out = recomputed(self._mix, mixed, number, context)
        else:
            out = self._mix(mixed, number, context)
        return self.out_proj(heads_to_sequence(out, self.cp).flatten(2))

    def _projected(self, x: Tensor) -> Tensor:
        """Project x to the channels [s/cp, b, key heads/tp * channels] of all key heads."""
        return self.in_proj(x)

    def _mix(self, mixed: Tensor, number: Tensor | None, context: BatchContext) -> Tensor:
        """Compute the gated and normalized head outputs [s, b, heads/(tp*cp) * dv]. `mixed` [s, b, key heads/(tp*cp),
        channels] contains the projected channels."""
        operands, gate, _ = self._operands(mixed, number, None)
        if self.kernel is not None:
            out = self.kernel(*operands, documents_in_steps(context.documents, self.steps))
        else:
            number = None if number is None else number.repeat_interleave(self.steps, dim=0)
            out, _ = gated_delta_chunks(*operands, number, chunks=Chunks(CHUNK, self.hardware))
        return self.gated(out[self.steps - 1 :: self.steps], gate, self.out_norm, self.eps)

    def _behind_cache(self, mixed: Tensor, cache: EarlierTokens) -> Tensor:
        """Compute the gated and normalized head outputs of the new tokens during generation, and update the cache. For
        each layer, the cache contains the state and the last inputs of the convolution. Padding does not change the
        state."""
        before, state = cache.states(self.layer) or (None, None)
        before = None if before is None else before.transpose(0, 1)
        (q, k, v, g, beta), gate, last = self._operands(mixed, None, before)
        lengths = cache.lengths
        if lengths is not None:
            padding = torch.arange(len(g), device=mixed.device)[:, None, None] >= self.steps * lengths[:, None]
            g = g.masked_fill(padding.reshape(*padding.shape, *(1,) * (g.ndim - 3)), 0.0)
            beta = beta.masked_fill(padding, 0.0)
            last = last_rows(mixed[..., : last.shape[-1]], before, lengths, len(last))
        rule: Callable[..., tuple[Tensor, Tensor]] = gated_delta_chunks
        if len(mixed) <= FEW_TOKENS:
            rule = gated_delta_steps
        out, state = rule(q, k, v, g, beta, None, state)
        cache.set_states(self.layer, last.transpose(0, 1), state)
        return self.gated(out[self.steps - 1 :: self.steps], gate, self.out_norm, self.eps)

    def _operands(self, mixed: Tensor, number: Tensor | None, before: Tensor | None) -> tuple[Operands, Tensor, Tensor]:
        """Compute the operands of the gated delta rule from the projected channels `mixed`. Return three values: the
        operands, the output gates [s, b, heads/(tp*cp), dv], and the last inputs of the convolution."""
        *qkv, gate, beta, decay = self.channels
        inputs, gate, beta, decay = mixed.split((sum(qkv), gate, beta, decay), dim=-1)
        conv1d, dt_bias, a_log = (local_slice(weight, self.cp) for weight in (self.conv1d, self.dt_bias, self.a_log))
        weights, rows = DeltaWeights(conv1d, dt_bias, a_log), DeltaRows(self.widths, self.strength, self.steps)
        operands, before = self.prepare(inputs, beta.flatten(2), decay.flatten(2), weights, rows, number, before)
        return operands, gate.unflatten(-1, (-1, self.value_width)).flatten(2, 3), before


@lru_cache(maxsize=64)
def documents_begun(documents: Documents, length: int, device: torch.device) -> Tensor:
    """Return the index [s, b] of each token's document within the sample, starting at 0. Each sample has `length`
    tokens. The results are cached, because all layers and passes of a micro-batch need the same tensor."""
    starts = np.zeros((length, len(documents)), dtype=np.int64)
    for sample, places in enumerate(documents):
        starts[list(places[1:]), sample] = 1
    return copied_to(torch.from_numpy(starts.cumsum(0)), device)


def last_rows(x: Tensor, before: Tensor | None, lengths: Tensor, count: int) -> Tensor:
    """Return the last `count` rows before the padding of each sample, as a tensor [count, b, ...].

    Args:
        x: [s, b, ...], rows.
        before: [count, b, ...], rows before x; None for zeros.
        lengths: [b], number of rows of each sample in x that are not padding.
        count: Number of rows to return.
    """
    rows = torch.cat((x.new_zeros(count, *x.shape[1:]) if before is None else before, x))
    places = torch.arange(count, device=x.device)[:, None] + lengths
    return rows[places, torch.arange(x.shape[1], device=x.device)]


class DeltaWeights(NamedTuple):
    """Parameters from which `delta_operands` computes the operands of the gated delta rule."""

    conv1d: Tensor
    dt_bias: Tensor
    a_log: Tensor


class DeltaRows(NamedTuple):
    """Number of rows per token in the operands of the gated delta rule, and the widths and bounds of these rows."""

    widths: tuple[int, int]
    """Number of channels per key and number of channels per value."""

    strength: float = 1.0
    """Upper bound of the write strength beta."""

    steps: int = 1
    """Number of keys that each token writes to the state."""

    least_decay: float | None = None
    """Lower bound of the log decay g. A bounded g is computed with a sigmoid. If `least_decay` is None, g is computed
    with a softplus and has no lower bound."""


def delta_operands(
    inputs: Tensor,
    beta: Tensor,
    decay: Tensor,
    weights: DeltaWeights,
    rows: DeltaRows,
    number: Tensor | None,
    before: Tensor | None,
) -> tuple[Operands, Tensor]:
    """Compute the operands of the gated delta rule. Return the operands, each of which has s * steps rows, and the last
    inputs of the convolution.

    The log decay g = -exp(A_log) softplus(decay + dt_bias) is fp32 even if the other operands are 16-bit, because g is
    summed over tokens. The write strength beta is at most `rows.strength`. If each token writes several keys, the token
    has one row per key. The first row of a token applies the decay, and the last row reads the state.

    Args:
        inputs: [s, b, key heads, channels], projected queries, keys and values: dk channels for the query, steps * dk
            for the keys, and steps * dv per value head for the values.
        beta: [s, b, steps * heads], projected write strengths.
        decay: [s, b, heads], projected decays; [s, b, heads, dk] if each channel has a separate decay.
        weights: Parameters of the convolution and of the decay.
        rows: Number of rows per token, and the widths and bounds of these rows (`DeltaRows`).
        number: [s, b], index of each token's document within its sample, from 0; None if there is only one document.
        before: [taps - 1, b, key heads, ...], earlier inputs of the convolution; None for zeros.
    """
    (conv1d, dt_bias, a_log), steps = weights, rows.steps
    mixed, last = short_convolution(inputs, conv1d, number, before)
    keys, values = rows.widths
    q, k, v = F.silu(mixed).split((keys, steps * keys, mixed.shape[-1] - (1 + steps) * keys), dim=-1)
    k, v = in_steps(k, steps), in_steps(v, steps)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON) for x in (q, k))
    v = v.unflatten(-1, (-1, values)).flatten(2, 3)
    wide = torch.promote_types(inputs.dtype, torch.float32)
    g = -a_log.to(wide).exp() * F.softplus(decay.to(wide) + dt_bias.to(wide))
    if rows.least_decay is not None:
        g = rows.least_decay * (a_log.to(wide).exp() * (decay.to(wide) + dt_bias.to(wide))).sigmoid()
    beta = in_steps(beta.unflatten(-1, (inputs.shape[2], -1)), steps).flatten(2)
    q, g = at_step(q, steps - 1, steps), at_step(g, 0, steps)
    q, k, v = (x.to(inputs.dtype) for x in (q, k, v))
    return (q, k, v, g, beta.sigmoid() * rows.strength), last


def in_steps(x: Tensor, steps: int) -> Tensor:
    """Split the channels of each token in x [s, b, n, steps * c] into `steps` rows, and return all rows as [s * steps,
    b, n, c]. The rows of a token are adjacent."""
    return x.unflatten(-1, (steps, -1)).movedim(-2, 1).flatten(0, 1)


def at_step(x: Tensor, step: int, steps: int) -> Tensor:
    """Expand each token of x [s, ...] to `steps` rows, [s * steps, ...]. Row `step` of a token contains the value of
    the token, and the other rows of the token are zero."""
    if steps == 1:
        return x
    zeros = torch.zeros_like(x)
    return torch.stack([x if each == step else zeros for each in range(steps)], dim=1).flatten(0, 1)


def documents_in_steps(documents: Documents | None, steps: int) -> Documents | None:
    """Convert the positions at which documents begin from token positions to row positions. Each token has `steps`
    rows."""
    return documents and tuple(tuple(steps * start for start in starts) for starts in documents)


def short_convolution(
    x: Tensor, weight: Tensor, number: Tensor | None = None, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply a depthwise causal convolution that does not cross document borders: y_t = sum_j weight_j x_{t - taps + 1 +
    j}. For 16-bit inputs, the sums are computed in fp32.

    Args:
        x: [s, b, n, c], inputs.
        weight: [n, c, taps].
        number: [s, b], index of each token's document within its sample, from 0; 0 for tokens that continue the
            document of `before`; None if there is only one document. The convolution replaces tokens of other documents
            with zeros.
        before: [taps - 1, b, n, c], inputs before x; None for zeros.

    Returns:
        The outputs [s, b, n, c], and the last taps - 1 inputs. To continue the sequence, pass these inputs as `before`
        in the next call.
    """
    taps = weight.shape[-1]
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows = torch.cat((x.new_zeros(taps - 1, *x.shape[1:]) if before is None else before, x))
    y, last = x * weight[..., -1], rows[len(x) :]
    if number is None:
        for back in range(1, taps):
            y = y + rows[taps - 1 - back : len(rows) - back] * weight[..., -1 - back]
        return y, last
    numbers = torch.cat((number.new_zeros(taps - 1, number.shape[1]), number))
    for back in range(1, taps):
        other = (numbers[taps - 1 - back : len(rows) - back] != number)[..., None, None]
        y = y + rows[taps - 1 - back : len(rows) - back].masked_fill(other, 0.0) * weight[..., -1 - back]
    return y, last.masked_fill((numbers[len(x) :] != number[-1])[..., None, None], 0.0)


L2_EPSILON = 1e-6
"""Epsilon that is added to the squared L2 norm of queries and keys before they are divided by the norm."""


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to the output of each head, and multiply the result by the SiLU of the head's gate. For 16-bit
    inputs, intermediate results are fp32.

    Args:
        x: [s, b, heads, dv], head outputs.
        gate: [s, b, heads, dv], gates before SiLU.
        weight: [dv], norm weight, shared by all heads.
        eps: Epsilon of the norm.

    Returns:
        The gated and normalized head outputs [s, b, heads * dv] in the dtype of `gate`.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps) * F.silu(gate.to(wide))
    return y.to(gate.dtype).flatten(2)
