"""Tests of the weight of each checkpoint in a merge. The emulated learning rate decay is compared with a simulation of
SGD, and invalid merges are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleLength
from megatron.extensions.interop.conversion.merge_weights import (
    STYLES,
    Decay,
    decay_weights,
    equal_weights,
    given_weights,
)

LR, BATCH, BRANCH = 0.25, 8, 5
"""Constant learning rate, number of samples per step, and iteration at which the decay begins."""

Gradient = Callable[[int, Tensor], Tensor]
"""Function (iteration, weights) that returns the gradient of one step."""


def sgd(gradient: Gradient, steps: int, rate: Callable[[int], float]) -> list[Tensor]:
    """Train with SGD, and return a list of the initial weights and the weights after each step."""
    found = [torch.linspace(-1, 1, 6, dtype=torch.float64)]
    for iteration in range(steps):
        found.append(found[-1] - rate(iteration) * gradient(iteration, found[-1]))
    return found


def decayed(decay: Decay, end: int) -> Callable[[int], float]:
    """Return a function that maps an iteration to the learning rate, for a run whose learning rate decays from
    iteration BRANCH to iteration `end`."""
    config = OptimizerConfig(
        lr=LR,
        min_lr=decay.floor * LR,
        lr_decay_style="WSD",
        lr_wsd_decay_style=decay.style,
        lr_decay_iters=end,
        lr_wsd_decay_iters=end - BRANCH,
    )
    length = ScheduleLength.in_iterations(config, end, lambda iteration: BATCH * iteration)
    scheduler = OptimizerParamScheduler(config, length)
    return lambda iteration: scheduler.lr_at(BATCH * iteration)


def emulated(constant: list[Tensor], decay: Decay, saved: list[int]) -> Tensor:
    weights = decay_weights(decay, [BATCH * iteration for iteration in saved], saved)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12) and min(weights) >= 0
    return sum((weight * constant[at] for weight, at in zip(weights, saved, strict=True)), torch.zeros(6).double())


def noise(seed: int) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DECAYS = [Decay(style, floor) for style in STYLES for floor in (0.0, 0.2)]


@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_emulation_is_exact_for_a_linear_loss_and_a_checkpoint_each_step(decay: Decay) -> None:
    """The gradients of a linear loss do not depend on the weights. In this test, the gradients differ from step to
    step."""
    end = BRANCH + 9

    def gradient(iteration: int, weights: Tensor) -> Tensor:
        return noise(iteration)

    constant, branch = sgd(gradient, end, lambda _: LR), sgd(gradient, end, decayed(decay, end))
    found = emulated(constant, decay, list(range(BRANCH, end + 1)))
    assert torch.allclose(found, branch[-1], rtol=0, atol=1e-13)
    assert not torch.allclose(constant[-1], branch[-1], atol=1e-2)


@pytest.mark.parametrize("decay", DECAYS, ids=str)
@pytest.mark.parametrize("saved", [[5, 8, 11, 14, 17], [5, 6, 13, 15]], ids=["even", "uneven"])
def test_emulation_is_exact_for_gradients_that_are_constant_between_checkpoints(decay: Decay, saved: list[int]) -> None:
    def gradient(iteration: int, weights: Tensor) -> Tensor:
        return noise(sum(at <= iteration for at in saved))

    end = saved[-1]
    constant, branch = sgd(gradient, end, lambda _: LR), sgd(gradient, end, decayed(decay, end))
    assert torch.allclose(emulated(constant, decay, saved), branch[-1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("style", STYLES)
def test_the_error_for_a_quadratic_loss_is_second_order(style: str) -> None:
    """The run with decay computes its gradients at weights that differ from the weights of the run with a constant
    learning rate. The emulation ignores this difference, so its error should be quadratic in the learning rate."""
    decay, end, errors = Decay(style), BRANCH + 8, list[float]()
    curvature = torch.linspace(0.2, 1, 6, dtype=torch.float64)
    for scale in (0.02, 0.01):

        def gradient(iteration: int, weights: Tensor, scale: float = scale) -> Tensor:
            return scale * (curvature * weights + noise(iteration))

        constant, branch = sgd(gradient, end, lambda _: LR), sgd(gradient, end, decayed(decay, end))
        errors.append(float((emulated(constant, decay, list(range(BRANCH, end + 1))) - branch[-1]).norm()))
    assert errors[0] > 1e-6 and errors[0] / errors[1] == pytest.approx(4, rel=0.05)


def test_linear_decay_over_many_steps_weights_checkpoints_equally() -> None:
    """The unweighted mean of the checkpoints emulates a linear decay of the learning rate to zero (arXiv
    2507.17634)."""
    found = decay_weights(Decay("linear"), [0, 1000, 2000, 3000], [0, 1000, 2000, 3000])
    assert found == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6], abs=1e-3)
    assert [after - before for before, after in pairwise(found[1:3])] == pytest.approx([0], abs=1e-12)


def test_a_decay_to_factor_one_uses_the_last_checkpoint() -> None:
    assert decay_weights(Decay("cosine", 1.0), [0, 4, 8], [0, 1, 2]) == [0, 0, 1]


def test_weights_match_values_computed_by_hand() -> None:
    assert equal_weights(4) == [0.25] * 4
    assert given_weights([0.333333, 0.333333, 0.333334], 3, False) == [0.333333, 0.333333, 0.333334]
    assert given_weights([2, -0.5], 2, True) == [2, -0.5]
    for values, allowed, message in (
        ([0.5, 0.5], False, "--weights has 2 values for 3 checkpoints; give one per checkpoint, in the same order"),
        ([1, 1, 2], False, "--weights sum to 4, but must sum to 1; give 0.25 0.25 0.5, or --allow-unnormalized"),
        ([1, -1, 0], False, "must sum to 1; give --allow-unnormalized to use these weights"),
        ([1, math.nan, 0], True, "--weights nan: must be finite"),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared
            given_weights(values, 3, allowed)
        assert message in str(error.value)
