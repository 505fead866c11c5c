"""Parameters that are not trained (--freeze): no gradient, no place in a bucket, no optimizer state."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.dist_checkpointing.state_dict import tagged_parameters
from megatron.core.dist_checkpointing.storage import gather
from megatron.core.parallel_state import Axis

SHOWN = 5
"""Names that an error lists."""


def freeze_parameters(modules: Iterable[nn.Module], config: OptimizerConfig, world: Axis) -> None:
    """Freezes what --freeze matches, before gradient buffers are built. Collective if there is anything to freeze.

    Raises ValueError, on every rank, for an expression that matches no parameter of the whole model, and if nothing is
    left to train."""
    if not config.freeze:
        return
    trained = {meta.name: param for meta, param in tagged_parameters(modules) if param.requires_grad}
    names = sorted({name for found in gather(list(trained), world) for name in found})
    some = ", ".join(names[:: max(1, len(names) // SHOWN)][:SHOWN])
    for pattern in config.freeze:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(f"--freeze {pattern}: matches no parameter; names are for example {some}")
    if all(map(config.freezes, names)):
        raise ValueError(
            f"--freeze {' '.join(config.freeze)}: matches all {len(names)} parameters, which leaves nothing to train; "
            f"names are for example {some}"
        )
    for name, param in trained.items():
        param.requires_grad_(not config.freezes(name))
