"""Configuration of recomputation: fields that `TransformerConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.parts import RECOMPUTED_PARTS


@dataclass(frozen=True)
class RecomputeConfig:
    """What is computed again in the backward pass instead of being kept."""

    recompute_granularity: str = flag("none", choices=("none", "selective", "full"))
    """Recompute nothing (none), parts of each layer (selective) or whole layers (full) in the backward pass."""

    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """Full recomputation: all layers in groups (uniform), or only the first layers of a stage (block)."""

    recompute_num_layers: int | None = None
    """Full recomputation: layers in a group (uniform), or layers recomputed in each stage (block)."""

    recompute_modules: tuple[str, ...] | None = flag(None, many=True, choices=RECOMPUTED_PARTS)
    """Selective recomputation: parts of each layer; default core_attn. core_attn is attention without its
    projections, layernorm both norms. In layers without experts, mlp is the whole MLP, mlp_act its activation function.
    In layers with experts, moe is the whole MoE layer, moe_act the activation functions of all experts, shared_experts
    the shared expert."""

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Parts of each layer that selective recomputation computes again."""
        return self.recompute_modules or ("core_attn",) if self.recompute_granularity == "selective" else ()

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation computes `module` again, and not a larger one that includes it."""
        named = self.recomputed_modules
        return module in named and RECOMPUTED_PARTS.facts(module).within not in named
