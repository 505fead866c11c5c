"""Parameters of the router and of the experts. No torch.

Their modules are built from these functions, and plans count what the functions return.
"""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Fused, Init, ParamMeta
from megatron.core.tensor_parallel.parameters import ReplicatedLinear, sequence_partial


def router_metas(name: str, config: TransformerConfig, sequence_parallel: bool) -> list[ParamMeta]:
    """The router's weight, and its bias if linear layers have biases. As in Megatron-LM, the bias is random too."""
    shape, init = (config.moe_choices, config.hidden_size), Init("normal", config.init_method_std)
    partial_over = sequence_partial(sequence_parallel)
    weight = ParamMeta(f"{name}.weight", shape, init=init, partial_over=partial_over, role="router")
    bias = ParamMeta(f"{name}.bias", shape[:1], init=init, partial_over=partial_over)
    return [weight, bias] if config.add_bias_linear else [weight]


def shared_gate_meta(name: str, config: TransformerConfig, sequence_parallel: bool) -> ParamMeta:
    """The weight of the shared expert's gate."""
    init, partial_over = Init("normal", config.init_method_std), sequence_partial(sequence_parallel)
    return ParamMeta(f"{name}.gate_weight", (1, config.hidden_size), init=init, partial_over=partial_over)


def latent_projections(name: str, config: TransformerConfig) -> tuple[ReplicatedLinear, ReplicatedLinear] | None:
    """fc1_latent_proj [latent, h] and fc2_latent_proj [h, latent], with Megatron-LM's names, and with biases if linear
    layers have them; None without a latent."""
    if config.moe_latent_size is None:
        return None
    hidden, latent, bias = config.hidden_size, config.moe_latent_size, config.add_bias_linear
    return (
        ReplicatedLinear(f"{name}.fc1_latent_proj", hidden, latent, bias, Init("normal", config.init_method_std)),
        ReplicatedLinear(f"{name}.fc2_latent_proj", latent, hidden, bias, Init("normal", config.output_init_std)),
    )


def router_states(name: str, config: TransformerConfig) -> list[tuple[ParamMeta, str]]:
    """Buffers of the router beside its weight, [E] each, with the name of the dtype: saved, but not trained."""
    if not config.moe_router_enable_expert_bias:
        return []
    return [(ParamMeta(f"{name}.expert_bias", (config.moe_choices,), init=Init("zeros")), "float32")]


def expert_metas(name: str, config: TransformerConfig) -> tuple[list[ParamMeta], list[ParamMeta]]:
    """Weights of linear_fc1 and linear_fc2 of all experts, each with its bias if there are biases. A gated fc1 stacks
    gate and up: [E, 2, ffn, h], h being the width of the latent of --moe-latent-size if there is one.

    The output of linear_fc2 is a partial sum over expert tensor parallelism: each rank holds the bias of a part of the
    columns, and adds that.
    """
    count, hidden, ffn = config.num_experts, config.expert_io_size, config.moe_ffn_size
    assert count is not None
    init, output_init = (Init("normal", std) for std in (config.init_method_std, config.output_init_std))
    fc1, dim = ((count, 2, ffn, hidden), 2) if config.gated else ((count, ffn, hidden), 1)
    fused = Fused("gate_up", 1, (1, 1)) if config.gated else None
    fc1_cut, fc2_cut = {"ep": 0, "expt_tp": dim}, {"ep": 0, "expt_tp": 2}
    weights = (
        ParamMeta(f"{name}.linear_fc1.weight", fc1, fc1_cut, init, expert=True, stacked=1, fused=fused),
        ParamMeta(f"{name}.linear_fc2.weight", (count, hidden, ffn), fc2_cut, output_init, expert=True, stacked=1),
    )
    biases = (
        ParamMeta(f"{name}.linear_fc1.bias", fc1[:-1], fc1_cut, Init("zeros"), expert=True),
        ParamMeta(f"{name}.linear_fc2.bias", (count, hidden), {"ep": 0, "expt_tp": 1}, Init("zeros"), expert=True),
    )
    fc1_metas, fc2_metas = (
        [weight, bias] if config.add_bias_linear else [weight] for weight, bias in zip(weights, biases, strict=True)
    )
    return fc1_metas, fc2_metas
