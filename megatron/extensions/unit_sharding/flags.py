"""Where the strategies are. No torch."""

from __future__ import annotations

from megatron.core.parts import SHARDING_STRATEGIES

SHARDING_STRATEGIES.register("optim_grads", f"{__package__}.unit_sharding:UnitSharding", gradients=True)
SHARDING_STRATEGIES.register(
    "optim_grads_params", f"{__package__}.unit_sharding:UnitSharding", gradients=True, parameters=True
)
