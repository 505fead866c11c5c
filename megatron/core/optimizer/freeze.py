"""Parameters that are not trained (--freeze): no gradient, no place in a bucket, no optimizer state."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.dist_checkpointing.state_dict import tagged_parameters
from megatron.core.dist_checkpointing.storage import gather
from megatron.core.parallel_state import Axis


def freeze_parameters(modules: Iterable[nn.Module], config: OptimizerConfig, world: Axis) -> None:
    """Freezes what --freeze matches, before gradient buffers are built. Collective if there is anything to freeze.

    Raises ValueError, on every rank, for an expression that matches no parameter of the whole model, and if nothing is
    left to train."""
    if not config.freeze:
        return
    trained = {meta.name: param for meta, param in tagged_parameters(modules) if param.requires_grad}
    config.check_freeze({name for found in gather(list(trained), world) for name in found})
    for name, param in trained.items():
        param.requires_grad_(not config.freezes(name))
