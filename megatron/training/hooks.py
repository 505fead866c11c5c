"""Metrics and callbacks of a user's own: what they are told, and how they are added to a run. No torch.

Those that an extension registers are part of every run that loads it; `Parts` adds objects of a program's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core.registry import NoFacts, Registry
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.core.batch import Batch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

METRICS: Registry[Any, NoFacts] = Registry("metric", NoFacts, "config")
"""`Metric(config)`: see `Metric`."""

CALLBACKS: Registry[Any, NoFacts] = Registry("callback", NoFacts, "config")
"""`Callback(config)`: see `Callback`."""


@dataclass
class RunView:
    """What callbacks and metrics see of a run, on each rank."""

    config: RunConfig
    stages: Mapping[int, GPTModel]
    """This rank's pipeline stages."""
    optimizer: DistributedOptimizer
    progress: Progress
    """`iteration` and `consumed_samples` so far."""
    say: Callable[[str], None]
    """Prints a line on one rank."""
    stop_reason: str | None = None

    def stop(self, why: str) -> None:
        """Asks for the end of the run. One rank is enough: at the next log line or evaluation, or the present one, all
        ranks save and stop together."""
        self.stop_reason = str(why or "a callback asks for it")


@dataclass(frozen=True)
class StepView:
    """What a metric sees of a step that has updated the weights."""

    run: RunView
    batches: Sequence[Batch]
    """This rank's micro-batches, on its device."""
    loss_and_tokens: Tensor
    """[loss sum, valid tokens] float64 on the device; zeros on ranks without the last stage."""


class Metric:
    """A mean over the steps of a log interval and over all ranks, logged under the name it is registered by."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def measure(self, step: StepView) -> tuple[Tensor | float, Tensor | float]:
        """(sum, count) of this rank; the metric is the sum of sums over the sum of counts. Tensors stay on the device,
        so that nothing waits for it. Steps that are skipped do not count."""
        raise NotImplementedError


class Callback:
    """Called on every rank. Records are equal on all ranks, so that all take the same decisions."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def on_start(self, run: RunView) -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_step_end(self, run: RunView) -> None:
        """After each step. The device may still be at work on it."""

    def on_log(self, run: RunView, record: Mapping[str, Any]) -> None:
        """After each log line, with its record."""

    def on_evaluation(self, run: RunView, split: str, record: Mapping[str, Any]) -> None:
        """After an evaluation of "valid" or "test", with a record that has `valid_loss` or `test_loss`, or of "tasks",
        with the scores of --eval-tasks as `eval/TASK/METRIC`."""

    def on_checkpoint(self, run: RunView) -> None:
        """After a save was started."""

    def on_end(self, run: RunView) -> None:
        """After the last step and the last save. What it raises is reported, and the other callbacks are called; the
        run ends with code 3 (`CALLBACK_FAILED`), or as a run to be resumed if it is one."""


@dataclass(frozen=True)
class Parts:
    """Objects that a program adds to a run: `pretrain(config, launch, Parts(callbacks=[...]))`."""

    callbacks: Sequence[Callback] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def with_registered(self, config: RunConfig) -> Parts:
        """These, after those that extensions have registered."""
        callbacks = [CALLBACKS[name](config) for name in CALLBACKS]
        metrics = {name: METRICS[name](config) for name in METRICS}
        return Parts((*callbacks, *self.callbacks), metrics | dict(self.metrics))
