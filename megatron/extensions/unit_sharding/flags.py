"""Registers the sharding strategies ZeRO-2 and ZeRO-3. No torch."""

from __future__ import annotations

from megatron.core.parts import SHARDING_STRATEGIES

UNIT_SHARDING = f"{__package__}.unit_sharding:UnitSharding"

SHARDING_STRATEGIES.register(
    "optim_grads",
    UNIT_SHARDING,
    about="gradients too, reduced with each micro-batch (ZeRO-2)",
    gradients=True,
)
SHARDING_STRATEGIES.register(
    "optim_grads_params",
    UNIT_SHARDING,
    about="parameters too, gathered layer by layer (ZeRO-3)",
    gradients=True,
    parameters=True,
)
