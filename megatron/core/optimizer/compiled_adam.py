"""AdamW's update of a shard as a compiled region: one kernel, which also writes the parameters.

Torch's fused kernel stores the gradient that it has scaled, and a copy reads the main parameters again to write those
in 16 bits: 8 of 38 bytes an element.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AdamScalars(NamedTuple):
    """What all elements share, fp32 scalars on the device: a change compiles nothing anew, and nothing waits."""

    factor: Tensor
    """Of the gradients."""

    skip: Tensor
    """1 where nothing is to change, else 0."""

    decay: Tensor
    """1 - learning rate * weight decay"""

    step_size: Tensor
    """Learning rate / correction of the first moment's bias"""

    correction: Tensor
    """Root of the correction of the second moment's bias"""


def adam_scalars(
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    factor: Tensor | None,
    skip: Tensor,
    updates: Tensor,
) -> AdamScalars:
    """Of one update after `updates` earlier ones. `factor`, `skip` and `updates` are float64 scalars on the device."""
    first, second = (1.0 - beta ** (updates + 1.0) for beta in betas)
    values = (
        torch.ones_like(skip) if factor is None else factor,
        skip,
        torch.full_like(skip, 1.0 - lr * weight_decay),
        lr / first,
        second.sqrt(),
    )
    return AdamScalars(*(value.to(torch.float32) for value in values))


def adamw_(
    main: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Tensor | None,
    scalars: AdamScalars,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One update (arXiv 1711.05101, algorithm 2) of tensors of one shape in fp32, in place; `params` get the new main
    parameters in their own dtype. The gradient is only read."""
    keeps = scalars.skip > 0
    g = grad * scalars.factor
    m = torch.lerp(exp_avg, g, 1.0 - betas[0])
    v = torch.lerp(exp_avg_sq, g * g, 1.0 - betas[1])
    new = main * scalars.decay - scalars.step_size * m / (v.sqrt() / scalars.correction + eps)
    new = torch.where(keeps, main, new)
    exp_avg.copy_(torch.where(keeps, exp_avg, m))
    exp_avg_sq.copy_(torch.where(keeps, exp_avg_sq, v))
    main.copy_(new)
    if params is not None:
        params.copy_(new)
