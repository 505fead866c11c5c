"""Callback that computes the model's FLOPs for a run, and adds the memory plan to an out-of-memory error.

This module does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.config.model import TransformerConfig
from megatron.training.hooks import Callback
from megatron.training.reliability.launch import Launch

if TYPE_CHECKING:
    from megatron.training.run import TrainingRun


class PlanOfRun(Callback):
    """Callback that gives a run access to the planner: it counts FLOPs, and explains out-of-memory errors. The
    planner's modules are imported on first use."""

    def flops_per_token(self, model: TransformerConfig) -> float:
        from megatron.extensions.plan.planner.flops import flops_per_token

        return flops_per_token(model)

    def on_failure(self, error: BaseException, launch: Launch, run: TrainingRun | None) -> None:
        """Add the memory plan to an out-of-memory error."""
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            from megatron.extensions.plan.planner.out_of_memory import explain

            explain(error, self.config, launch, run)
