"""Data classes for the progress of a run, the next step, the parts of a step, and the values collected over a log
interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.run_config import Point, RunConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from megatron.core.dist_checkpointing.storage import Checkpoint
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, StepResult
    from megatron.core.parallel_state import ParallelState


@dataclass(frozen=True)
class Step:
    """A training step: its number, and the samples that it consumes."""

    iteration: int
    """Number of the step, counted from 1, as in logs, files and messages."""

    first_sample: int
    """Number of the step's first sample, which equals the number of samples consumed before the step."""

    samples: int
    """Global batch size of the step."""


@dataclass
class Progress:
    """Position of a run, saved in every checkpoint."""

    iteration: int = 0
    consumed_samples: int = 0
    """Number of samples consumed so far. This number determines which batches follow, and how large they are."""

    scheduled_samples: int = 0
    """Number of samples in steps that updated the weights. The schedules of learning rate and weight decay count these
    samples, so the schedules do not advance in skipped steps. If the run's length is given in iterations, the samples
    are counted as if every step had used the current batch sizes (`RunPlan.schedule_sizes`)."""

    skipped_iterations: int = 0
    """Number of iterations without an update, because of a non-finite value, a spike, or --iterations-to-skip."""

    nan_iterations: int = 0
    """Number of steps skipped because the loss or gradient was not finite. Overflows that the fp16 loss scale caused
    are not counted."""

    skipped_spikes: int = 0
    """Number of steps skipped because the loss or gradient was far above its running mean."""

    running_means: tuple[float, ...] = ()
    """Running mean of the loss, running mean of the gradient norm, and number of averaged steps. Empty if the run does
    not check for spikes."""

    past_batches: tuple[Point, ...] = field(default=(), compare=False)
    """Positions at which the batch size changed. The position of the last save comes last. Empty at the start of a
    run."""

    data_fingerprint: str | None = None
    """Fingerprint of the training data. If two runs have equal fingerprints, each sample index refers to the same
    sample in both runs."""

    loaded_from: str | None = field(default=None, compare=False)
    """Checkpoint from which this process resumed."""

    origin: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Description, in JSON types, of the original model if the weights came from a model in another format. The model's
    loader sets this description.

    All later checkpoints contain this description of the original model, including the checkpoints of runs that load
    only the weights.
    """

    def next_step(self, batch_sizes: BatchSizes) -> Step:
        return Step(self.iteration + 1, self.consumed_samples, batch_sizes.at(self.consumed_samples))


GRAD_SYNC = "grad_sync"
STEP_PARTS = ("data", "forward", "backward", GRAD_SYNC, "optimizer")
"""Parts of a step: reading samples, forward passes, backward passes, the end of gradient reduction, and the update."""


EVALUATION, SAVE = "evaluation batch", "save"
"""Names of timed parts of a run that do not belong to a step."""


class BegunRun(Protocol):
    """A run that has not taken its first step. A callback may load weights into this run. The object is a
    `RunCheckpoint`."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def state(self) -> ParallelState: ...

    @property
    def stages(self) -> Mapping[int, Module]: ...

    @property
    def optimizer(self) -> DistributedOptimizer: ...

    def resume_from(
        self, load: str, say: Callable[[str], None], data: Callable[[int], str | None], why: str
    ) -> Progress:
        """Load the newest checkpoint in the folder `load`. `why` is the reason that the log states. Collective."""

    def resume_with(
        self, checkpoint: Checkpoint, say: Callable[[str], None], data: Callable[[int], str | None], source: str
    ) -> Progress:
        """Load an open checkpoint. The log line names `source` as the origin of the checkpoint. Collective."""


class StepsTakenBackError(Exception):
    """Exception with which a callback's `on_verdict` undoes steps. The callback raises this exception on every rank.
    The training loop then calls `restore`, which returns the run to an earlier step, and continues from that step."""

    def __init__(self, restore: Callable[[], None]) -> None:
        super().__init__("steps are undone")
        self.restore = restore


class StepTimers:
    """Factory of context managers that time the parts of a step, evaluation batches and saves. For example, `with
    timers("forward"):` times a forward pass. The other names are those in `STEP_PARTS`, `EVALUATION` and `SAVE`.

    To time or trace the parts, add a watcher, which is a function that returns a context manager for a part. If there
    are no watchers, the timers do nothing.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[str], AbstractContextManager[None]]] = []

    def __call__(self, part: str) -> AbstractContextManager[None]:
        return self._watched(part) if self.watchers else nullcontext()

    @contextmanager
    def _watched(self, part: str) -> Iterator[None]:
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.enter_context(watcher(part))
            yield


@dataclass
class Interval:
    """Results of the steps since the last log line. The methods never wait for the device."""

    start: float = field(default_factory=time.perf_counter)
    losses: list[Tensor] = field(default_factory=list)
    """For each iteration, a tensor [loss sum, number of tokens] of this rank. The tensor is zero if another rank counts
    the tokens."""
    results: list[StepResult] = field(default_factory=list)
    passed_over: int = 0
    """Number of iterations since the last log line that --iterations-to-skip skipped."""
    excluded: float = 0.0
    """Seconds spent on work other than training, such as evaluation."""
    learning_rate: float = 0.0
    decoupled_lr: float | None = None
    batch_size: int = 0
    samples: int = 0

    def add(self, step: Step, loss_and_tokens: Tensor, result: StepResult) -> None:
        """Add the results of a completed step. `loss_and_tokens` is [loss sum, number of tokens] on this rank."""
        self.results.append(result)
        self.losses.append(loss_and_tokens)
        self.batch_size = step.samples
        self.samples += step.samples

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Context manager that excludes the time spent in its block from the step time."""
        began = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - began

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.excluded
