"""Keeps the averages: after each step, each moves towards the main parameters of this rank's shard."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.optimizer.owned_tensors import with_main_weights
from megatron.core.torch_private import foreach_copy_, foreach_lerp_
from megatron.extensions.optim.averaged_weights.flags import Average, AveragedWeightsFlags, averages_of
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, RunView


class MovingAverages(Callback):
    """Averages of the main parameters: fp32 under --bf16 and --fp16. A step that is skipped counts as one that changes
    nothing."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.averages = averages_of(config)
        self.evaluates = config.options(AveragedWeightsFlags).eval_weights == "ema"
        self.steps: dict[str, int] = {}
        """Steps in each average, by name. With none it is not begun."""

        self.samples = 0

    def on_start(self, run: RunView) -> None:
        self.samples = run.progress.consumed_samples

    @torch.no_grad()
    def on_step_end(self, run: RunView) -> None:
        tokens = (run.progress.consumed_samples - self.samples) * self.config.model.seq_length
        self.samples = run.progress.consumed_samples
        for average in self.averages:
            pairs = list(with_main_weights(run.optimizer, self._pieces(average)))
            targets, weights = ([pair[side] for pair in pairs] for side in (0, 1))
            if targets and not self.steps.get(average.name):
                foreach_copy_(targets, weights)
            elif targets:
                foreach_lerp_(targets, weights, 1 - average.decay(tokens))
            self.steps[average.name] = self.steps.get(average.name, 0) + 1

    def evaluation_weights(self, run: RunView) -> Iterable[OptimizerPiece] | None:
        first = self.averages[0]
        return self._pieces(first) if self.evaluates and self.steps.get(first.name) else None

    def _pieces(self, average: Average) -> list[OptimizerPiece]:
        return [piece for piece in self.states if piece.key == average.name]

    def state(self) -> dict[str, dict[str, int]]:
        return {"steps": self.steps}

    def load_state(self, state: object) -> None:
        steps = state.get("steps") if isinstance(state, dict) else None
        saved = steps.items() if isinstance(steps, dict) else ()
        self.steps = {str(name): count for name, count in saved if type(count) is int and count >= 0}
