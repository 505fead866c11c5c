"""The flag of fusions, and what they take the place of. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.config.flag_spec import Section
from megatron.core.parts import LAYERS, NORMALIZATIONS
from megatron.training.extensions import extension_flags

_HERE = "megatron.extensions.fusions"


@extension_flags("fusions", may_change=True)
@dataclass(frozen=True)
class Fusions:
    fusions: bool = True
    """Use fused layers and kernels where regions are compiled, as on GPUs (see --compile). Each kernel is compared with
    plain torch at start; one that is wrong, fails or is slower is left out. --no-fusions uses none."""


def fuses(config: Section, ctx: Any) -> bool:
    """Whether a part with this configuration and context is built in its fused form."""
    return bool(ctx.compiled) and config.options(Fusions).fusions


LAYERS.substitute(
    "transformer_layer",
    f"{_HERE}.layer:FusedTransformerLayer",
    when=lambda name, config, ctx: fuses(config, ctx),
)
for _norm in ("LayerNorm", "RMSNorm"):
    NORMALIZATIONS.substitute(
        _norm,
        f"{_HERE}.fused_norm:Fused{_norm}",
        when=lambda name, size, config, ctx, partial_over: fuses(config, ctx),
    )
