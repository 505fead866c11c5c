"""Keeps the averages: after each step, each moves towards the main parameters of this rank's shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.torch_private import foreach_copy_, foreach_lerp_
from megatron.extensions.optim.averaged_weights.flags import AveragedWeightsFlags, averages_of
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
        if any(shard.on_host for shard in run.optimizer.shards):
            run.optimizer.finish_param_sync()  # the host has updated its part
        for average in self.averages:
            pairs = list(self._pairs(run, average.name))
            targets, weights = ([pair[side] for pair in pairs] for side in (0, 1))
            if targets and not self.steps.get(average.name):
                foreach_copy_(targets, weights)
            elif targets:
                foreach_lerp_(targets, weights, 1 - average.decay(tokens))
            self.steps[average.name] = self.steps.get(average.name, 0) + 1

    def _pairs(self, run: RunView, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Elements of an average, and the main parameters of the same elements, on the same device."""
        by_param: dict[str, list[OptimizerPiece]] = {}
        for piece in self.states:
            if piece.key == name:
                by_param.setdefault(piece.meta.name, []).append(piece)
        for shard in run.optimizer.shards:
            for part, span in shard.owned_pieces(*shard.range):
                main = shard.read_main(span.start, span.stop)
                for piece in by_param[part.meta.name]:
                    start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
                    if start < stop:
                        target = piece.data[start - piece.start : stop - piece.start]
                        yield target, main[start - part.start : stop - part.start].to(target.device)

    def evaluation_weights(self, run: RunView) -> Iterable[OptimizerPiece] | None:
        first = self.averages[0].name
        if not self.evaluates or not self.steps.get(first):
            return None
        return [piece for piece in self.states if piece.key == first]

    def state(self) -> dict[str, dict[str, int]]:
        return {"steps": self.steps}

    def load_state(self, state: object) -> None:
        steps = state.get("steps") if isinstance(state, dict) else None
        saved = steps.items() if isinstance(steps, dict) else ()
        self.steps = {str(name): count for name, count in saved if type(count) is int and count >= 0}
