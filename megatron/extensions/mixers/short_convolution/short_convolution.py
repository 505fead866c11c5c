"""Short convolution between two gates, as in LFM2 (arXiv 2511.23404).

For each channel, one projection produces an input gate B, an output gate C, and an input x. A depthwise causal
convolution with a short kernel is applied to the elementwise product B x. The convolution output, multiplied by C, is
projected to hidden states. Channels are sharded over the tensor-parallel ranks.

Under context parallelism, an all-to-all converts B x from sequence shards of all channels to whole sequences of some
channels. A second all-to-all converts the outputs back to sequence shards. Each rank computes the convolution over
whole sequences for its channels. The gates B and C are not exchanged.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.batch import BatchContext, EarlierTokens
from megatron.core.collectives import local_slice
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, make_sharded_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear
from megatron.core.transformer.recompute import recomputed
from megatron.extensions.attention.context_parallel.attention import heads_to_sequence, sequence_to_heads
from megatron.extensions.mixers.linear_attention.gated_delta_net import documents_begun, last_rows, short_convolution
from megatron.extensions.mixers.short_convolution.flags import ShortConvolutionFlags


class BetweenProjections(nn.Module):
    """Base class of mixers that apply `in_proj`, `_mix` and `out_proj` in this order. The backward pass recomputes the
    activations inside `_mix`."""

    in_proj: nn.Module
    out_proj: nn.Module
    cp: Axis

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output for the input x. The input and the output are [s/cp, b, h], or [s/(cp*tp), b, h] under
        sequence parallelism."""
        mixed = self.in_proj(x)
        length = len(mixed) * self.cp.size
        documents = context.documents
        cache = context.cache
        number = None if documents is None else documents_begun(documents, length, mixed.device)
        again = self.training and cache is None
        return self.out_proj(recomputed(self._mix, mixed, number, None) if again else self._mix(mixed, number, cache))

    def _mix(self, mixed: Tensor, number: Tensor | None, cache: EarlierTokens | None) -> Tensor:
        """Compute the input of `out_proj`. `mixed` [s/cp, b, features/tp] is the output of `in_proj`. `number` [s, b]
        is the index of each token's document within the sample, starting at 0."""
        raise NotImplementedError


class ShortConvolution(BetweenProjections):
    """Short convolution layer: an input projection, an input gate, a convolution, an output gate, and an output
    projection."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own, hidden = config.options(ShortConvolutionFlags), config.hidden_size
        taps, bias = own.short_conv_kernel_dim, own.short_conv_bias

        self.cp, self.layer = ctx.state.cp, ctx.layer
        self.conv_weight = make_sharded_parameter(f"{name}.conv1d.weight", (hidden, 1, taps), ctx, role="convolution")
        within = Init("uniform", low=-(taps**-0.5), high=taps**-0.5)
        of_bias = (f"{name}.conv1d.bias", (hidden,), ctx)
        self.conv_bias = make_sharded_parameter(*of_bias, role="bias", init=within) if bias else None
        # The outputs of in_proj are the input gates, the output gates and the inputs.
        in_proj = ColumnLinear(f"{name}.in_proj", hidden, (3, hidden), bias, shard_dim=1)
        self.in_proj = column_parallel(in_proj, ctx)
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", hidden, hidden, bias), ctx)
        self.convolved = region(convolved, ctx.compiled)

    def _mix(self, mixed: Tensor, number: Tensor | None, cache: EarlierTokens | None) -> Tensor:
        """Compute the gated outputs [s/cp, b, h/tp]. `mixed` [s/cp, b, 3 * h/tp] contains the projected gates and
        inputs."""
        before_gate, behind_gate, x = mixed.unflatten(-1, (3, -1)).unbind(-2)
        x = sequence_to_heads((before_gate * x).unflatten(-1, (self.cp.size, -1)), self.cp)
        weight = local_slice(self.conv_weight, self.cp)
        bias = None if self.conv_bias is None else local_slice(self.conv_bias, self.cp)
        states = None if cache is None else cache.states(self.layer)
        before = None if states is None else states[0].transpose(0, 1)
        y, last = self.convolved(x, weight, bias, number, before)
        if cache is not None:  # cache the inputs of the last tokens that are not padding
            last = last if cache.lengths is None else last_rows(x, before, cache.lengths, len(last))
            cache.set_states(self.layer, last.transpose(0, 1))
        return behind_gate * heads_to_sequence(y, self.cp).flatten(2)


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply a depthwise causal convolution with an optional bias. The convolution does not cross document borders. For
    16-bit inputs, the sums are computed in fp32.

    Args:
        x: [s, b, c], inputs.
        weight: [c, 1, taps].
        bias: [c]; None for no bias.
        number: [s, b], index of each token's document within its sample, from 0; None if there is only one document.
        before: [taps - 1, b, c], inputs before x; None for zeros.

    Returns:
        The outputs [s, b, c], and the inputs of the last taps - 1 tokens, [taps - 1, b, c].
    """
    before = None if before is None else before.unsqueeze(-1)
    y, last = short_convolution(x.unsqueeze(-1), weight, number, before)
    y = y.squeeze(-1)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype), last.squeeze(-1)
