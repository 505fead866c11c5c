"""Where these ways are. No torch."""

from __future__ import annotations

from megatron.core.parts import CONTEXT_PARALLEL

CONTEXT_PARALLEL.register("all_gather", f"{__package__}.attention:gathered_attention")
CONTEXT_PARALLEL.register(
    "a2a", f"{__package__}.attention:ulysses_attention", by_heads=True, rules=f"{__package__}.rules:heads_over_context"
)
