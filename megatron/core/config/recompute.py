"""Configuration of recomputation: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag

RECOMPUTED_WITH = {"mlp_act": "mlp", "moe_act": "moe", "shared_experts": "moe"}
"""Parts of --recompute-modules, each with the larger one that includes it."""


@dataclass(frozen=True)
class RecomputeConfig:
    """What is computed again in the backward pass instead of being kept."""

    recompute_granularity: str = flag("none", choices=("none", "selective", "full"))
    """Recompute nothing (none), parts of each layer (selective) or whole layers (full) in the backward pass."""

    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """Full recomputation: all layers in groups (uniform), or only the first layers of a stage (block)."""

    recompute_num_layers: int | None = None
    """Full recomputation: layers in a group (uniform), or layers recomputed in each stage (block)."""

    recompute_modules: tuple[str, ...] | None = flag(
        None,
        many=True,
        choices=("core_attn", "mla_up_proj", "layernorm", "mlp_act", "mlp", "moe_act", "moe", "shared_experts"),
    )
    """Selective recomputation: parts of each layer; default core_attn. core_attn is attention without its
    projections, mla_up_proj queries, keys and values from the latents of multi-latent attention, layernorm both norms.
    In layers without experts, mlp is the whole MLP, mlp_act its activation function. In layers with experts, moe is
    the whole MoE layer, moe_act the activation functions of all experts, shared_experts the shared expert."""

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Parts of each layer that selective recomputation computes again."""
        return self.recompute_modules or ("core_attn",) if self.recompute_granularity == "selective" else ()

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation computes `module` again, and not a larger one that includes it."""
        larger = RECOMPUTED_WITH.get(module)
        return module in self.recomputed_modules and larger not in self.recomputed_modules
