"""Weights of the checkpoints in a merge: equal, given by hand, or those that emulate a decay of the learning rate. This
module does not import torch.

The emulation is that of Warmup-Stable-Merge (arXiv 2507.17634, theorem 3.1). Let theta_0, ..., theta_k be checkpoints
of a run with a constant learning rate, and g_i the sum of the run's updates between theta_{i-1} and theta_i. A weighted
mean of the checkpoints scales these updates:

    sum_j c_j theta_j = theta_0 + sum_i w_i g_i    with    w_i = c_i + c_{i+1} + ... + c_k    and    sum_j c_j = 1

A run that decays from theta_0 on scales each update by the ratio of its learning rate to the constant one. So w_i is
the mean of this ratio over the updates between theta_{i-1} and theta_i, and the weights are

    c_0 = 1 - w_1,    c_j = w_j - w_{j+1},    c_k = w_k

The merged weights equal those of the decayed run if updates are proportional to the learning rate and do not depend on
the weights, and if the ratio, or the update, is constant between two checkpoints. Otherwise they are an approximation,
which leaves out that a decayed run has other gradients, and that momentum delays updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.param_scheduler import WSD_ANNEAL, ScheduleLength, wsd

STYLES = tuple(WSD_ANNEAL)
"""Shapes of a decay: values of --lr-wsd-decay-style."""

TOLERANCE = 1e-6
"""How far the sum of weights may be from one."""


@dataclass(frozen=True)
class Decay:
    """A decay of the learning rate to emulate: a final anneal of --lr-decay-style WSD."""

    style: str
    floor: float = 0.0
    """Learning rate at the end, as a share of the rate before the decay."""


def equal_weights(count: int) -> list[float]:
    return [1.0 / count] * count


def given_weights(values: Sequence[float], count: int, allow_unnormalized: bool) -> list[float]:
    """Weights from --weights. Raises ValueError unless there is one for each of `count` checkpoints, all are finite,
    and they sum to one or need not."""
    if len(values) != count:
        raise ValueError(
            f"--weights has {len(values)} values for {count} checkpoints; give one for each, in their order"
        )
    if bad := [value for value in values if not math.isfinite(value)]:
        raise ValueError(f"--weights {bad[0]}: must be finite")
    total = math.fsum(values)
    if not allow_unnormalized and abs(total - 1) > TOLERANCE:
        remedy = "give --allow-unnormalized to merge with them as they are"
        if total > 0:
            remedy = f"give {' '.join(f'{value / total:.8g}' for value in values)}, or --allow-unnormalized"
        raise ValueError(f"--weights sum to {total:.8g}, and must sum to 1; {remedy}")
    return list(values)


def decay_weights(decay: Decay, positions: Sequence[float], iterations: Sequence[int]) -> list[float]:
    """Weights of checkpoints of a run with a constant learning rate that emulate a decay from the first to the last.

    The learning rate of each update is that of a run whose --lr-wsd-decay-samples span the checkpoints, so it depends
    on the samples before the update, as in training. The formula is in the docstring of this module.

    Args:
        positions: Samples, or iterations, at which each checkpoint was saved; increasing.
        iterations: Updates before each checkpoint; increasing.

    Returns:
        One weight for each checkpoint, which sum to one and are not negative.
    """
    first, last = positions[0], positions[-1]
    length = ScheduleLength(warmup=0.0, decay=last, anneal=last - first, total=last)
    config = OptimizerConfig(lr=1.0, min_lr=decay.floor, lr_decay_style="WSD", lr_wsd_decay_style=decay.style)
    shares = [1.0]
    for (start, end), (before, after) in zip(pairwise(positions), pairwise(iterations), strict=True):
        step = (end - start) / (after - before)
        rates = (wsd(start + step * update, length, config) for update in range(after - before))
        shares.append(math.fsum(rates) / (after - before))
    return [share - following for share, following in pairwise((*shares, 0.0))]
