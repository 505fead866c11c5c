"""Registers hash routing, and defines its flag and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.moe import ROUTERS
from megatron.training.config.problem import Problem, unless_at_most
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

SWITCH = "--moe-n-hash-layers"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(HashRoutingFlags)
    m = config.model
    if not own.moe_n_hash_layers:
        return
    sinkhorn = "sinkhorn" in m.moe_router_load_balancing_type
    forced = any(getattr(each, "moe_router_force_load_balancing", False) for each in m.extension_options)
    yield from unless_at_most(SWITCH, own.moe_n_hash_layers, "--num-layers", m.num_layers)
    for other, given, why in (
        ("--moe-router-load-balancing-type sinkhorn", sinkhorn, "a table determines the experts"),
        ("--moe-router-force-load-balancing", forced, "a table determines the experts"),
        (f"--moe-zero-experts {m.moe_zero_experts}", m.moe_zero_experts, "the table has no zero experts"),
    ):
        if given:
            yield Problem.exclusive(SWITCH, own.moe_n_hash_layers, other, why)


@extension_flags("hash routing", part_of="model", rules=rules)
@dataclass(frozen=True)
class HashRoutingFlags:
    """Hash routing (Hash Layers, arXiv 2106.04426; DeepSeek-V4)."""

    NO_EFFECT_WITHOUT: ClassVar = "--num-experts"

    moe_n_hash_layers: int = flag(0, at_least=0)
    """Number of layers at the beginning of the model that select experts by token id, using a fixed table. The table of
    a new model contains random experts. The scores of the router are the weights of the expert outputs. Layers with
    hash routing have no balancing loss and no expert bias."""


ROUTERS.register(
    "hash",
    f"{__package__}.hash_router:HashRouter",
    when=lambda config, number: number < config.options(HashRoutingFlags).moe_n_hash_layers,
)
