"""Mixture-of-experts (MoE) layer, in place of the MLP (Switch Transformer, arXiv 2101.03961; Mixtral, 2401.04088)."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.moe.dispatcher import DISPATCHERS
from megatron.core.moe.experts import Experts
from megatron.core.moe.router import TopKRouter
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.mlp import SharedExpert
from megatron.core.transformer.recompute import recomputed


class MoELayer(nn.Module):
    """Sum over a token's chosen experts of weight * expert(x), plus the shared expert's output where there is one.

    Each rank routes tokens of its own, so tensor parallelism requires sequence parallelism.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert ctx.sequence_parallel or ctx.tp.size == 1, "tensor-parallel ranks would route the same tokens"
        self.router = TopKRouter(f"{name}.router", config, ctx)
        self.experts = Experts(f"{name}.experts", config, ctx)
        self.dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](config.num_experts, ctx.experts)
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExpert(f"{name}.shared_experts", config, ctx) if shared else None
        self.recompute = config.recomputes("moe")

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """x [s, b, h] -> [s, b, h]; both [s/t, b, h] under sequence parallelism"""
        return recomputed(self._run, x, context) if self.recompute and self.training else self._run(x, context)

    def _run(self, x: Tensor, context: BatchContext) -> Tensor:
        choice = self.router(x, context)
        routes = self.dispatcher.plan(choice.experts.flatten(0, 1))
        rows, weights = routes.of_tokens(x.flatten(0, 1)), routes.of_assignments(choice.weights.flatten())
        out = routes.of_tokens.transposed(self.experts(rows, weights, routes.segments)).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)
