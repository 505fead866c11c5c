"""Loss scale of fp16 training: large enough that small gradients survive, small enough that large ones do."""

from __future__ import annotations

from megatron.core.config.optimizer import OptimizerConfig


class LossScaler:
    """A fixed scale; 1 where no scaling is needed."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @property
    def can_fall(self) -> bool:
        """True if an overflow may be the scale's fault, and be gone with a lower one."""
        return False

    def update(self, overflow: bool) -> None:
        """Learns whether the step's gradients overflowed."""

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed scale is what the configuration says, whatever was saved."""


class DynamicLossScaler(LossScaler):
    """Halves on overflow and doubles after `window` good steps in a row.

    `hysteresis` overflows are forgiven before the scale falls; from then on each one halves it, until a full window
    of good steps doubles it and restores the allowance. Never below `min_scale`.
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
    """The scaler a run needs: none (scale 1) but in fp16, there dynamic unless --loss-scale fixes it."""
    if not fp16:
        return LossScaler()
    if config.loss_scale is not None:
        return LossScaler(config.loss_scale)
    return DynamicLossScaler(
        config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window, config.hysteresis
    )
