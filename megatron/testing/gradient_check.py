"""Comparison of gradients with finite differences of the loss, parameter by parameter, in one process.

Comparing a layout with a single-process run proves nothing if the gradients of the single-process run are wrong. This
check tests those gradients. For each parameter p with gradient g and a random direction d of norm 1, (loss(p + e d) -
loss(p - e d)) / 2e must equal <g, d>.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.core.batch import Batch
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import FLOOR
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from megatron.training.metrics.meters import MultiTokenLosses
from megatron.training.progress import Step
from megatron.training.run import TrainingRun

STEP_SIZE = 1e-5
"""Step size e. In fp64, both the truncation error (order e^2) and the rounding error (order 1e-16 / e) are far below
the tolerance."""

TOLERANCE = 1e-4
"""Largest relative difference that can be explained by the error of finite differences alone. The error is largest near
a point where the loss is not differentiable, such as the kink of ReLU."""


def gradient_differences(config: RunConfig, timeout: float) -> list[tuple[str, float]]:
    """Compare each parameter's gradient with a finite difference of the loss. Return pairs (parameter, relative
    difference) in the order of the backward pass.

    `config` must be a configuration for a single process in fp64. Auxiliary losses are disabled, because they add to
    gradients but not to the reported loss.
    """
    config = resolve(config, 1)
    batch = config.training.global_batch_size
    assert batch is not None and config.parallel.fp64
    model = replace(
        config.model, moe_aux_loss_coeff=(0.0,) * len(config.model.moe_aux_loss_coeff), moe_z_loss_coeff=0.0
    )
    training = replace(config.training, micro_batch_size=batch, num_microbatches=1)
    config = replace(config, model=model, training=training)
    return run_world(1, _gradient_differences, config, timeout=timeout)[0]


def _gradient_differences(rank: int, world_size: int, config: RunConfig) -> list[tuple[str, float]]:
    with local_run(config, rank, world_size) as run:
        step = run.progress.next_step(run.batch_sizes)
        batches = run.data.read_batches(step)
        _loss(run, step, batches)
        params: list[Any] = list(reversed(run.ddp.params))
        gradients = [param.main_grad.double().clone() for param in params]
        floor = FLOOR * max(gradient.norm().item() for gradient in gradients)
        return [
            (param.meta.name, _difference(run, step, batches, param, gradient, floor))
            for param, gradient in zip(params, gradients, strict=True)
        ]


def _loss(run: TrainingRun, step: Step, batches: list[Batch]) -> float:
    """Run the passes of a step, and return the step's loss sum, including the losses of multi-token prediction. The
    gradients remain in `main_grad`."""
    sums = run.forward_backward(step, batches, run.optimizer.loss_scale)
    assert sums.seed == 1.0, "fp64 has no loss scale"
    further = next(meter for meter in run.meters if isinstance(meter, MultiTokenLosses))
    loss = (sums.loss_and_tokens[0] + further.weighted_sum()).item()
    further.discard_step()
    return loss


def _difference(
    run: TrainingRun, step: Step, batches: list[Batch], param: Any, gradient: torch.Tensor, floor: float
) -> float:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(param.shape, generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    kept, losses = param.detach().clone(), []
    for offset in (STEP_SIZE, -STEP_SIZE, 0.0):
        with torch.no_grad():
            param.copy_(kept + offset * direction)
        if offset:
            losses.append(_loss(run, step, batches))
    measured, expected = (losses[0] - losses[1]) / (2 * STEP_SIZE), torch.sum(gradient * direction).item()
    # typical size of the gradient's component in a random direction
    share = max(gradient.norm().item(), floor) / param.numel() ** 0.5
    return abs(measured - expected) / max(abs(measured), abs(expected), share)
