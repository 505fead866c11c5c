"""Checks and prints what is trained and how: parameters that are not (--freeze), and groups (--param-group)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import lines_of_groups
from megatron.core.dist_checkpointing.state_dict import tagged_parameters
from megatron.core.dist_checkpointing.storage import gather
from megatron.core.parallel_state import Axis


def freeze_parameters(modules: Iterable[nn.Module], config: OptimizerConfig, world: Axis) -> list[str]:
    """Freezes what --freeze matches, before gradient buffers are built, and returns lines to print on the groups of the
    others, where there are groups beside the usual ones. Collective if a flag names parameters or there are such.

    A frozen parameter has no gradient, no place in a bucket and no optimizer state. Raises ValueError, on every rank,
    for an expression of --freeze or --param-group that matches no parameter of the whole model, and if nothing is left
    to train."""
    if not config.names_parameters and not config.has_own_groups:
        return []
    trained = {meta.name: (meta, param) for meta, param in tagged_parameters(modules) if param.requires_grad}
    groups = {name: (config.group_of(name, meta.kind), meta.numel) for name, (meta, _) in trained.items()}
    whole = {name: group for found in gather(groups, world) for name, group in found.items()}
    config.check_names(whole)
    for name, (_, param) in trained.items():
        param.requires_grad_(not config.freezes(name))
    if not config.has_own_groups:
        return []
    return list(lines_of_groups({name: group for name, group in whole.items() if not config.freezes(name)}))
