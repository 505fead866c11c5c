"""Moving averages of the weights. Every --ema-interval steps, each rank updates the averages of the main parameters in
its optimizer shard.

With rounding to nearest, a bf16 average would lose all changes smaller than half the distance between two adjacent bf16
numbers. If the decay is larger than 0.998, all changes are that small. A bf16 average is therefore rounded
stochastically. The random bits of this rounding are a hash of the operands and the iteration number, so a resumed run
computes the same bits. The average of constant weights converges to the weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.dropout import mixed, round_to_bf16, uniform_of
from megatron.core.optimizer.owned_tensors import with_main_weights
from megatron.core.torch_private import foreach_copy_, foreach_lerp_
from megatron.extensions.optim.averaged_weights.flags import AVERAGES, Average, AveragedWeightsFlags, averages_of
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, RunView

AT_ONCE = 2**22
"""Largest number of elements of a bf16 average that are updated at once. This number limits the size of temporary
tensors."""


SALT = 0x3C6EF372
"""Salt of the hash that computes the random bits for stochastic rounding of averages."""


class MovingAverages(Callback):
    """Callback that updates the moving averages of the main parameters. By default, the averages are in fp32 under
    --bf16 and --fp16. The averages treat a skipped step like a step that does not change the weights."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.averages = averages_of(config)
        flags = config.options(AveragedWeightsFlags)
        self.evaluates, self.interval = flags.eval_weights == "ema", flags.ema_interval
        self.steps: dict[str, int] = {}
        """Mapping from the names of averages to the numbers of their updates. Averages without updates may be
        missing."""

        self.updated: tuple[int, int] | None = None
        """Iteration number and number of consumed samples at the last update of the averages."""

        self.said = False
        """True if a log line has already reported that the average to evaluate has no updates yet."""

    def on_start(self, run: RunView) -> None:
        if self.config.training.skip_train and self.evaluates and not self.steps.get(self.averages[0].name):
            raise ValueError(self._why_none())
        now = run.progress.iteration, run.progress.consumed_samples
        self.updated = now if self.updated is None else min(now, self.updated)

    @torch.no_grad()
    def on_step_end(self, run: RunView) -> None:
        assert self.updated is not None, "on_start comes first"
        iteration, samples = run.progress.iteration, run.progress.consumed_samples
        if iteration % self.interval:
            return
        steps, tokens = iteration - self.updated[0], (samples - self.updated[1]) * self.config.model.seq_length
        self.updated = iteration, samples
        for average in self.averages:
            pairs = list(with_main_weights(run.optimizer, self._pieces(average)))
            targets, weights = ([pair[side] for pair in pairs] for side in (0, 1))
            if targets and not self.steps.get(average.name):
                foreach_copy_(targets, weights)
            elif targets:
                _move_(targets, weights, 1 - average.decay(steps, tokens), iteration)
            self.steps[average.name] = self.steps.get(average.name, 0) + 1

    def evaluation_weights(self, run: RunView) -> Iterable[OptimizerPiece] | None:
        if not self.evaluates:
            return None
        first = self.averages[0]
        if self.steps.get(first.name):
            return self._pieces(first)
        if not self.said:
            run.say(
                f"--eval-weights ema: {first.name} has not started, so the trained weights are evaluated until then"
            )
        self.said = True
        return None

    def _why_none(self) -> str:
        """Return the error message for an evaluation-only run whose checkpoint does not contain the average to
        evaluate."""
        wanted, options = self.averages[0].name, self.config.checkpoint
        there = ", ".join(name for name, count in sorted(self.steps.items()) if count)
        if options.load is None:
            why = "without --load there are no averages; add --load with a checkpoint of a run that kept averages"
        elif options.anew:
            why = "--finetune and --reset-iteration load no averages; remove these flags"
        elif there:
            why = f"the checkpoint has no {wanted}, but {there}; select one of these with {AVERAGES}"
        else:
            why = f"the checkpoint has no averaged weights; train with {AVERAGES}, or leave out --eval-weights"
        return f"--eval-weights ema: {why}"

    def _pieces(self, average: Average) -> list[OptimizerPiece]:
        return [piece for piece in self.states if piece.key == average.name]

    def state(self) -> dict[str, object]:
        own = {average.name: self.steps[average.name] for average in self.averages if average.name in self.steps}
        return {"steps": own, "updated": None if self.updated is None else list(self.updated)}

    def load_state(self, state: object) -> None:
        found = state if isinstance(state, dict) else {}
        steps, updated = found.get("steps"), found.get("updated")
        saved = steps.items() if isinstance(steps, dict) else ()
        self.steps = {str(name): count for name, count in saved if type(count) is int and count >= 0}
        if isinstance(updated, list) and len(updated) == 2 and all(type(each) is int for each in updated):
            self.updated = updated[0], updated[1]


def _move_(averages: list[Tensor], weights: list[Tensor], share: float, iteration: int) -> None:
    """Update each average in place: average += share * (weight - average). `iteration` seeds the stochastic rounding of
    bf16 averages."""
    if averages[0].dtype != torch.bfloat16:
        foreach_lerp_(averages, [weight.to(averages[0].dtype) for weight in weights], share)
        return
    for average, weight in zip(averages, weights, strict=True):
        for part, towards in zip(average.split(AT_ONCE), weight.split(AT_ONCE), strict=True):
            change = (towards.to(torch.float32) - part) * share
            key = mixed(change.view(torch.int32)) ^ part.view(torch.int16).to(torch.int32)
            part.copy_(round_to_bf16(part + change, uniform_of(key, SALT ^ iteration)))
