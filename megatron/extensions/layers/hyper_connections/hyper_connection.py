"""Manifold-constrained hyper-connections (mHC, arXiv 2512.24880; hyper-connections: arXiv 2409.19606).

The residual stream [s, b, n * h] consists of n concatenated streams. A sublayer f reads a weighted sum of the streams
and updates each stream: x'_k = sum_j res[j, k] x_j + post_k f(sum_j pre_j x_j). For each token, the weights pre and
post and the doubly stochastic matrix res are computed from the streams of this token. The formulas match Hugging Face's
implementation of DeepSeek-V4. Tokens do not depend on each other, so sequence and context parallelism need no
communication. The parameters are replicated on all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta, Role
from megatron.core.tensor_parallel.layers import TPContext, make_parameter
from megatron.core.tensor_parallel.linear_spec import sequence_partial
from megatron.core.transformer.block import Stream, added
from megatron.core.transformer.recompute import recomputed, with_input_recomputed
from megatron.extensions.layers.hyper_connections.flags import HyperConnectionFlags
from megatron.extensions.layers.hyper_connections.mixing import Epsilons, Mix, MixFunction, contracted, stream_weights

T = TypeVar("T")
Sublayer = Callable[[Tensor, BatchContext], Tensor]


class PendingMix:
    """Operands for mixing the streams. The first sublayer of a layer passes these operands to the second sublayer,
    which computes the mixed streams. The backward pass of the second sublayer recomputes the mixed streams, so they are
    not saved."""

    def __init__(self, parts: Mix, compiled: bool) -> None:
        self.parts, self.compiled = parts, compiled

    def added(self) -> Tensor:
        """Compute and return the mixed streams [s, b, n * h]."""
        return self.made(self.parts)

    def made(self, parts: Mix) -> Tensor:
        return MixFunction.apply(*parts, self.compiled).flatten(-2)


class TokenWeights(nn.Module):
    """Base class of modules that compute weights for each token from the streams of this token. The weights are a
    normalized projection of the streams, multiplied by trained factors, plus a bias. Only the streams are saved for the
    backward pass, which recomputes everything else.
    """

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        own = config.options(HyperConnectionFlags)
        self.streams, self.iterations = own.mhc_num_residual_streams, own.mhc_sinkhorn_iterations
        self.epsilons, self.compiled = Epsilons(config.norm_epsilon, own.mhc_epsilon), ctx.compiled

    def of_kept(self, function: Callable[[Tensor], T], x: Tensor) -> T:
        """Return function(x). In training, only x is saved for the backward pass, which recomputes function(x)."""
        return recomputed(function, x) if self.training else function(x)

    def projected(self, x: Tensor, weight: Tensor) -> Tensor:
        """Project the streams x [s, b, n * h] to [s, b, rows]. The result is fp32 if x is 16-bit."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide))

    def split(self, x: Tensor) -> Tensor:
        """Split the concatenated streams x [s, b, n * h] into [s, b, n, h]."""
        return x.unflatten(-1, (self.streams, -1))


class HyperConnection(TokenWeights):
    """Residual connection around one sublayer. The connection computes the sublayer's input from the streams, mixes the
    streams, and adds the weighted output of the sublayer to each stream.

    With --recompute-modules mhc, the first sublayer of a layer leaves the mixing of the streams to the second sublayer,
    which recomputes the mixed streams in the backward pass instead of saving them.
    """

    def __init__(self, sublayer: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(config, ctx)
        width, name = config.residual_size, f"{sublayer}_hyper_connection"
        rows = self.streams * (self.streams + 2)
        """Number of weights per token: n for the sublayer's input, n for the sublayer's output, and n * n for the
        mixing matrix."""
        bound = sqrt(6 / (rows + width))
        factor = Init("constant", value=config.options(HyperConnectionFlags).mhc_init_gating_factor)

        def made(key: str, shape: tuple[int, ...], role: Role, init: Init | None = None) -> nn.Parameter:
            partial_over = sequence_partial(ctx.sequence_parallel)
            return make_parameter(ParamMeta(f"{name}.{key}", shape, {}, init, partial_over, role=role), ctx)

        # Names and initial values match the dev branch of Megatron-LM.
        self.mapping_proj = made("mapping_proj.weight", (rows, width), "gate", Init("uniform", low=-bound, high=bound))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            made(f"alpha_{of}", (1,), "vector", factor) for of in ("pre", "post", "res")
        )
        self.bias = made("bias", (rows,), "bias")
        kind = config.layer(ctx.layer)
        self.recompute = config.recomputes("mhc") and kind.mixes and kind.mlp

    @staticmethod
    def enter(x: Tensor, config: TransformerConfig) -> Tensor:
        """Return n streams [s, b, n * h], each of which is a copy of the hidden states x [s, b, h]."""
        return x.repeat(1, 1, config.residual_size // config.hidden_size)

    @staticmethod
    def leave(norm: str, config: TransformerConfig, ctx: TPContext) -> nn.Module:
        learned = config.options(HyperConnectionFlags).mhc_output_contract == "learned"
        return SumOfStreams(norm, config, ctx) if learned else MeanOfStreams(config, ctx)

    def forward(self, x: Stream, sublayer: Sublayer, context: BatchContext) -> Stream:
        """Apply the sublayer to the streams x, and return the updated streams. The old and the updated streams are [s,
        b, n * h], or [s/tp, b, n * h] under sequence parallelism."""
        if isinstance(x, PendingMix):
            return with_input_recomputed(x.made, x.parts, self._mixed, sublayer, context)
        left = self.recompute and self.training
        return self._pending(added(x), sublayer, context) if left else self._mixed(added(x), sublayer, context)

    def _mixed(self, x: Tensor, sublayer: Sublayer, context: BatchContext) -> Tensor:
        return self._pending(x, sublayer, context).added()

    def _pending(self, x: Tensor, sublayer: Sublayer, context: BatchContext) -> PendingMix:
        read, post, res = self.of_kept(self._weights, x)
        return PendingMix(Mix(self.split(x), post, res, sublayer(read, context)), self.compiled)

    def _weights(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors that are computed from the streams x [s, b, n * h]: the sublayer's input [s, b, h], the
        weights post [s, b, n], and the mixing matrix res [s, b, n, n]."""
        factors = self.alpha_pre, self.alpha_post, self.alpha_res
        projected = self.projected(x, self.mapping_proj)
        weights = region(stream_weights, self.compiled)
        return weights(self.split(x), projected, factors, self.bias, self.iterations, self.epsilons)


class MeanOfStreams(TokenWeights):
    """Module that returns the mean of the streams after the last layer."""

    def forward(self, x: Stream) -> Tensor:
        """Return the hidden states [s, b, h] for the streams x. Sequence parallelism divides s by tp."""
        return self.split(added(x)).mean(-2)


class SumOfStreams(TokenWeights):
    """Module that returns a weighted sum of the streams after the last layer. The weights are computed from the streams
    of each token."""

    def __init__(self, norm: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(config, ctx)
        name, partial_over = norm.rpartition(".")[0], sequence_partial(ctx.sequence_parallel)

        def made(key: str, shape: tuple[int, ...], role: Role, init: Init | None = None) -> nn.Parameter:
            return make_parameter(ParamMeta(f"{name}.{key}", shape, {}, init, partial_over, role=role), ctx)

        self.hc_head_fn = made("hc_head_fn", (self.streams, config.residual_size), "gate")
        self.hc_head_base = made("hc_head_base", (self.streams,), "bias")
        # The initial scale is 1, as in Megatron-LM and transformers, and does not depend on --mhc-init-gating-factor.
        self.hc_head_scale = made("hc_head_scale", (1,), "vector", Init("constant", value=1.0))

    def forward(self, x: Stream) -> Tensor:
        """Return the hidden states [s, b, h] for the streams x. Sequence parallelism divides s by tp."""
        hidden: Tensor = self.of_kept(self._contracted, added(x))
        return hidden

    def _contracted(self, x: Tensor) -> Tensor:
        projected, contract = self.projected(x, self.hc_head_fn), region(contracted, self.compiled)
        return contract(self.split(x), projected, self.hc_head_scale, self.hc_head_base, self.epsilons)
