"""Gradient noise scale flags. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

SWITCH = "--log-noise-scale"
ROLL_BACK = "--optimizer-post-validation: rolled-back steps would be counted"
GRAPHS = (
    "--cuda-graph-impl local: a graph replays only its kernels, so the gradients of a micro-batch cannot be measured"
)
PARTS = "--context-parallel-size above 1: no rank has the gradient of whole samples before the reduction"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(NoiseScaleFlags)
    small, large = config.training.micro_batch_size, config.training.global_batch_size
    if own.log_noise_scale and small and large and small >= large:
        rule = "compares gradients of a micro-batch and the global batch, but the global batch has only one micro-batch"
        yield Problem("--micro-batch-size", small, rule, "lower it, or remove " + SWITCH)


@extension_flags("gradient noise scale", may_change=True, rules=rules)
@dataclass(frozen=True)
class NoiseScaleFlags:
    log_noise_scale: bool = flag(False, excludes=(ROLL_BACK, GRAPHS, PARTS))
    """Log the gradient noise scale in samples, with its 95% interval. Batches far smaller than the noise
    scale make efficient use of samples. Batches far larger than the noise scale hardly reduce the number of steps."""

    noise_scale_window: int = flag(200, at_least=2, no_effect_without=SWITCH)
    """Number of recent steps from which the noise scale is estimated."""


CALLBACKS.register(
    "noise scale",
    f"{__package__}.measure:NoiseScale",
    when=lambda config: config.options(NoiseScaleFlags).log_noise_scale and not config.training.skip_train,
)
