"""Computation of the coefficients (weights) of the checkpoints in a merge. The coefficients are equal, set by the user,
or chosen so that the merge emulates a learning rate decay. This module does not import torch.

The emulation follows Warmup-Stable-Merge (arXiv:2507.17634, theorem 3.1). Let theta_0, ..., theta_k be checkpoints of a
run with a constant learning rate, and let g_i be the sum of the run's updates between theta_{i-1} and theta_i. A
weighted mean of the checkpoints with the weights c_j scales these updates by w_i:

    sum_j c_j theta_j = theta_0 + sum_i w_i g_i    with    w_i = c_i + c_{i+1} + ... + c_k    and    sum_j c_j = 1

If the learning rate decayed from theta_0 on, each update would be scaled by the ratio of the decayed to the constant
learning rate. Therefore w_i is chosen as the mean of this ratio over the updates between theta_{i-1} and theta_i. The
checkpoint weights are

    c_0 = 1 - w_1,    c_j = w_j - w_{j+1},    c_k = w_k

The merged weights equal the decayed run's weights under two conditions. First, updates are proportional to the learning
rate and independent of the weights. Second, between two consecutive checkpoints, either the ratio of the learning rates
or the update is constant. If these conditions do not hold, the merged weights approximate the decayed run's weights.
The approximation ignores that a decayed run computes different gradients, and that momentum delays updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.param_scheduler import WSD_ANNEAL, ScheduleLength, wsd

STYLES = tuple(WSD_ANNEAL)
"""Permitted decay shapes, which are the values of --lr-wsd-decay-style."""

TOLERANCE = 1e-6
"""Maximum permitted deviation from 1 of the sum of the weights in --weights."""


@dataclass(frozen=True)
class Decay:
    """Learning rate decay that a merge emulates. The decay has the same form as the final annealing phase of
    --lr-decay-style WSD."""

    style: str
    floor: float = 0.0
    """Final learning rate, as a fraction of the learning rate before the decay."""


def equal_weights(count: int) -> list[float]:
    return [1.0 / count] * count


def given_weights(values: Sequence[float], count: int, allow_unnormalized: bool) -> list[float]:
    """Validate and return the weights of the checkpoints that the user specified with --weights.

    Raises ValueError if the number of weights is not `count`, or if a weight is not finite. Also raises ValueError if
    the weights do not sum to 1, unless `allow_unnormalized` is True.
    """
    if len(values) != count:
        raise ValueError(
            f"--weights has {len(values)} values for {count} checkpoints; give one per checkpoint, in the same order"
        )
    if bad := [value for value in values if not math.isfinite(value)]:
        raise ValueError(f"--weights {bad[0]}: must be finite")
    total = math.fsum(values)
    if not allow_unnormalized and abs(total - 1) > TOLERANCE:
        remedy = "give --allow-unnormalized to use these weights"
        if total > 0:
            remedy = f"give {' '.join(f'{value / total:.8g}' for value in values)}, or --allow-unnormalized"
        raise ValueError(f"--weights sum to {total:.8g}, but must sum to 1; {remedy}")
    return list(values)


def decay_weights(decay: Decay, positions: Sequence[float], iterations: Sequence[int]) -> list[float]:
    """Return one weight per checkpoint, such that the weighted mean emulates a learning rate decay. The checkpoints are
    from a run with a constant learning rate. The emulated decay extends from the first to the last checkpoint.

    The emulated decay is the same as if --lr-wsd-decay-samples were the number of samples between the first and the
    last checkpoint. As in training, the learning rate of an update depends on the number of samples before the update.
    The formula is in the docstring of this module.

    Args:
        positions: Number of samples or iterations at which each checkpoint was saved, in increasing order.
        iterations: Number of updates before each checkpoint, in increasing order.

    Returns:
        One weight per checkpoint. The weights are non-negative and sum to 1.
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
