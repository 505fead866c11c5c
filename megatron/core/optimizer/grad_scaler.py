"""Loss scaling for fp16 training. The loss is multiplied by a scale that is large enough to preserve small gradients,
and small enough to avoid overflow."""

from __future__ import annotations

from megatron.core.config.optimizer import OptimizerConfig


class LossScaler:
    """Fixed loss scale. A scale of 1 means that the loss is not scaled."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @property
    def can_fall(self) -> bool:
        """True if the scale can still be lowered to avoid an overflow."""
        return False

    def update(self, overflow: bool) -> None:
        """Record whether the step's gradients overflowed."""

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing. The configuration determines the scale, so the saved scale is ignored."""


class DynamicLossScaler(LossScaler):
    """Dynamic loss scale, which is halved on overflow and doubled after `window` consecutive steps without overflow.

    The first `hysteresis` - 1 overflows do not change the scale, and each further overflow halves it. `window`
    consecutive steps without overflow double the scale and reset the count of overflows. The scale never falls below
    `min_scale`.
    """

    dynamic = True

    def __init__(self, initial_scale: float, min_scale: float, window: int, hysteresis: int) -> None:
        super().__init__(initial_scale)
        self.min_scale = min_scale
        self.window = window
        self.hysteresis = hysteresis
        self.good_steps = 0
        self.allowance = hysteresis

    @property
    def can_fall(self) -> bool:
        return self.scale > self.min_scale

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good_steps = 0
            self.allowance -= 1
            if self.allowance <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
        else:
            self.good_steps += 1
            if self.good_steps == self.window:
                self.good_steps, self.allowance = 0, self.hysteresis
                self.scale *= 2

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "allowance": self.allowance}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self.good_steps, self.allowance = int(state["good_steps"]), int(state["allowance"])


def build_loss_scaler(config: OptimizerConfig, fp16: bool) -> LossScaler:
    """Build the loss scaler of a run. In fp16 training, the loss scale is dynamic unless --loss-scale is given. In all
    other precisions, the loss scale is 1."""
    if not fp16:
        return LossScaler()
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale)
    return DynamicLossScaler(
        config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window, config.hysteresis
    )
