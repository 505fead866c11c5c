"""Mixture-of-experts (MoE) layer, which replaces the MLP (Switch Transformer, arXiv 2101.03961; Mixtral,
2401.04088)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import ROUTERS, router_of
from megatron.core.moe.dispatcher import DISPATCHERS
from megatron.core.moe.experts import Experts
from megatron.core.moe.router import RouterFunction
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import ReplicatedParallelLinear, TPContext, make_parameter
from megatron.core.tensor_parallel.linear_spec import ReplicatedLinear, sequence_partial
from megatron.core.transformer.mlp import SharedExpert
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.recompute import recomputed


class GatedSharedExpert(SharedExpert):
    """Shared expert whose output is multiplied by the gate sigmoid(x wᵀ), which is one number per token (Qwen2-MoE)."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__(name, config, ctx)
        partial_over = sequence_partial(ctx.sequence_parallel)
        gate = ParamMeta(f"{name}.gate_weight", (1, config.hidden_size), partial_over=partial_over, role="gate")
        self.gate_weight = make_parameter(gate, ctx)
        self.gate_dtype = torch.promote_types(ctx.dtype, torch.float32)
        self.queue = ctx.queue

    def _run(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        gate = RouterFunction.apply(x, self.gate_weight, self.gate_dtype, self.queue).sigmoid()
        return super()._run(x) * gate.to(x.dtype)


class MoELayer(nn.Module):
    """Mixture-of-experts layer. The output for a token x is the sum of weight * expert(x) over the selected experts of
    the token, plus the output of the shared expert if there is one.

    With --moe-latent-size, the input of the experts is fc1_latent_proj(x), and fc2_latent_proj maps the weighted sum of
    the expert outputs back to the hidden size. Each token that is sent between ranks therefore has only
    --moe-latent-size elements.

    A zero-computation expert adds weight * x to the output. If the residual connection requires the outputs of the
    shared expert and of the selected experts separately, the layer returns their concatenation [s, b, 2h] instead of
    their sum.

    Each rank must route different tokens, so tensor parallelism requires sequence parallelism.
    """

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        assert config.num_experts is not None
        assert ctx.sequence_parallel or ctx.tp.size == 1, (
            "without sequence parallelism, all tensor-parallel ranks would route the same tokens"
        )
        self.router = ROUTERS.build(router_of(config, ctx.layer), f"{name}.router", config, ctx)
        self.experts = Experts(f"{name}.experts", config, ctx)
        down, up = latent_projections(name, config) or (None, None)
        self.fc1_latent_proj = nn.Identity() if down is None else ReplicatedParallelLinear(down, ctx)
        self.fc2_latent_proj = nn.Identity() if up is None else ReplicatedParallelLinear(up, ctx)
        padded = config.moe_pad_expert_input_to_capacity
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]
        self.dispatcher = dispatcher(config.num_experts, ctx, self.experts.grouped, padded, config.moe_choices)
        self.apart = config.residual is not None and RESIDUALS.facts(config.residual).experts_apart
        shared = config.moe_shared_expert_intermediate_size
        expert = GatedSharedExpert if config.moe_shared_expert_gate else SharedExpert
        self.shared_experts = expert(f"{name}.shared_experts", config, ctx) if shared else None
        of_output = f"{name}.output_layernorm", config.hidden_size, config, ctx
        self.output_layernorm = build_norm(*of_output) if config.moe_output_norm else nn.Identity()
        self.recompute = config.recomputes("moe")

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the output of the layer for x. Input and output have the shape [s, b, h], or [s/t, b, h] under
        sequence parallelism."""
        return recomputed(self._run, x, context) if self.recompute and self.training else self._run(x, context)

    def _run(self, x: Tensor, context: BatchContext) -> Tensor:
        choice = self.router(x, context)
        finish = self.dispatcher.start(choice.experts.flatten(0, 1), choice.most)
        # The shared experts run between `start` and `finish`, so that the host launches their kernels before it waits
        # for the message sizes.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        routes = finish()
        latent = self.fc1_latent_proj(x)
        rows, weights = routes.dispatch(latent.flatten(0, 1), choice.weights.flatten())
        out = self.fc2_latent_proj(routes.combine(self.experts(rows, weights, routes.segments)).view_as(latent))
        if choice.kept is not None:
            out = out + x * choice.kept.to(x.dtype)
        if self.apart:
            assert shared is not None
            return torch.cat((shared, out), dim=-1)
        return self.output_layernorm(out if shared is None else out + shared)


def latent_projections(name: str, config: TransformerConfig) -> tuple[ReplicatedLinear, ReplicatedLinear] | None:
    """Return the specifications of the linear layers fc1_latent_proj (weight [latent, h]) and fc2_latent_proj (weight
    [h, latent]), which are named as in Megatron-LM. The projections have biases if `config.add_bias_linear` is True.
    Return None if --moe-latent-size is not set.
    """
    if config.moe_latent_size is None:
        return None
    hidden = config.hidden_size
    latent = config.moe_latent_size
    bias = config.add_bias_linear
    return (
        ReplicatedLinear(f"{name}.fc1_latent_proj", hidden, latent, bias),
        ReplicatedLinear(f"{name}.fc2_latent_proj", latent, hidden, bias, to_residual=True),
    )
