"""Registers hyper-connections, and defines their flags and flag rules. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

SWITCH = "--enable-mhc-connections"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(HyperConnectionFlags)
    if own.enable_mhc_connections and config.model.recomputes("mhc") and config.model.num_layers > 0:
        with suppress(ValueError):  # other rules report an invalid layer pattern
            if not any(kind.mixes and kind.mlp for kind in config.model.layers):
                rule = "has no effect if every layer has only one sublayer: it applies between two sublayers"
                yield Problem("--recompute-modules", "mhc", rule, "remove it", harmless=True)


@extension_flags("hyper-connections", part_of="model", rules=rules)
@dataclass(frozen=True)
class HyperConnectionFlags:
    """Manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""

    NO_EFFECT_WITHOUT: ClassVar = SWITCH

    enable_mhc_connections: bool = flag(
        False,
        "--enable-hyper-connections",
        excludes=(
            "--parallel-residual: sublayers read and write the streams one after another",
            "--norm-placement sum: there is no sum of a stream and an output",
        ),
    )
    """Use several residual streams (mHC, as in DeepSeek-V4). The input of each sublayer is a weighted sum of the
    streams. A doubly stochastic matrix mixes the streams, and then the sublayer's output is added to each stream. The
    weights of the sum and the matrix are computed for each token from its streams."""

    mhc_num_residual_streams: int = flag(4, "--num-residual-streams", at_least=1)
    """mHC: number of residual streams. Each stream has --hidden-size channels."""

    mhc_sinkhorn_iterations: int = flag(20, at_least=1)
    """mHC: number of Sinkhorn-Knopp iterations, which make the rows and columns of the mixing matrix sum to 1."""

    mhc_init_gating_factor: float = 0.01
    """mHC: initial value of the factors by which the token-dependent parts of a sublayer's weights are multiplied. The
    weights of the sum after the last layer have such a factor, too; its initial value is always 1."""

    mhc_epsilon: float = flag(1e-6, at_least=0)
    """mHC: epsilon added to a sublayer's input weights, and to the entries and sums of the mixing matrix."""

    mhc_output_contract: str = flag("learned", choices=("learned", "mean"))
    """mHC: method that reduces the streams to hidden states after the last layer. learned: sum with token-dependent
    weights. mean: mean of the streams."""


def is_chosen(config: TransformerConfig) -> bool:
    return config.options(HyperConnectionFlags).enable_mhc_connections


def stream_size(config: TransformerConfig) -> int:
    """Return the total number of channels of all streams."""
    return config.options(HyperConnectionFlags).mhc_num_residual_streams * config.hidden_size


RESIDUALS.register(
    "mhc",
    f"{__package__}.hyper_connection:HyperConnection",
    switch=SWITCH,
    when=is_chosen,
    width=stream_size,
    recomputed="mhc",
)
