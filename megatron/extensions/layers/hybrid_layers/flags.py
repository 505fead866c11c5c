"""Flag --hybrid-layer-pattern, and the condition under which the flags of linear attention have an effect.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import Condition, Section, flag
from megatron.core.config.layers import LayerPattern, Sublayers
from megatron.core.registry import imported
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

PATTERN = "--hybrid-layer-pattern"
DENSE, EXPERTS = "-", "E"
"""Letters in the pattern for a layer with a dense MLP and for a layer with a mixture of experts."""


def has_linear_attention(name: str, letter: str) -> Condition:
    """Return a condition that is true if the model uses the linear attention variant `name`, whose letter in the
    pattern is `letter`. The flags of the variant have an effect only if the condition is true."""

    def holds(config: RunConfig) -> bool:
        try:
            return name in config.model.linear_attentions
        except ValueError:
            return True  # another rule reports an invalid pattern

    return Condition(f"--experimental-attention-variant {name} or {letter} in {PATTERN}", holds)


@extension_flags(
    "layers of one sublayer",
    rules=f"{__package__}.pattern:rules",
    resolve=f"{__package__}.pattern:with_pattern",
    part_of="model",
)
@dataclass(frozen=True)
class HybridConfig(LayerPattern):
    """Options for layers with one sublayer each."""

    hybrid_layer_pattern: str | None = flag(
        None,
        "--hybrid-override-pattern",
        excludes=(
            "--experimental-attention-variant: letters select the layers with linear attention",
            Condition(
                "--moe-layer-freq: letters select the layers with experts",
                lambda config: config.model.moe_layer_freq != "1",
            ),
            "--parallel-residual: each layer has only one sublayer",
        ),
        effective="layers",
    )
    """Pattern of layers with one sublayer each. The letters are: * attention (+ with --multi-latent-attention), G gated
    delta net, M Mamba-2, H attention and Mamba-2 in parallel, S Mamba-1, R RG-LRU, C short convolution, L lightning
    attention, K Kimi Delta Attention, - MLP, E experts. The character | is a border between two pipeline stages. The
    character / begins a multi-token prediction module, which has a mixer, an MLP, or both. If a pattern is set,
    --num-layers and --mtp-num-layers are not needed. Without a pattern, each layer has a mixer and an MLP."""

    @property
    def states_layers(self) -> bool:
        return self.hybrid_layer_pattern is not None

    def stated_layers(self, config: Section) -> tuple[Sublayers, ...]:
        found: tuple[Sublayers, ...] = imported(f"{__package__}.pattern:hybrid_layers")(config)
        return found
