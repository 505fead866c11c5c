"""Components of a training run on one rank, and the class that owns these components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.training.checkpoints.saving import RunSaver
from megatron.training.config.batch_size import BatchSizes
from megatron.training.data import TrainingData
from megatron.training.forward_backward import ForwardBackward, Pipeline
from megatron.training.hooks import Callback, Meter, RunView, Task
from megatron.training.initialize import Runtime
from megatron.training.metrics.console import LogLines
from megatron.training.plan import RunPlan
from megatron.training.progress import Interval, Step, StepTimers
from megatron.training.step_guard import StepGuard


class RunStep(Protocol):
    """Interface of the object that performs the steps of a run."""

    def __call__(self, step: Step) -> None:
        """Perform a step: compute the gradients for the step's batch, and update the weights."""

    def finish(self) -> None:
        """Finish the work in progress when no further step follows."""


@dataclass(kw_only=True)
class TrainingRun(RunView):
    """Object that owns all components of a run on one rank. The training loop owns this object, and passes to each
    function only the components that the function uses.

    `config` is the configuration of the current phase, and `plan.base` is the configuration that results from the
    flags. `progress` and `interval` change with every step. The other components are built once and stay the same for
    the whole run.
    """

    plan: RunPlan
    runtime: Runtime
    ddp: DistributedDataParallel
    scheduler: OptimizerParamScheduler
    pipeline: Pipeline
    forward_backward: ForwardBackward
    data: TrainingData
    batch_sizes: BatchSizes
    train_iters: int
    saver: RunSaver
    lines: LogLines
    guard: StepGuard
    callbacks: Sequence[Callback]
    meters: list[Meter]
    """Meters of the run: the built-in meters and those of callbacks."""

    step: RunStep = field(init=False)
    """A `megatron.training.train_step.TrainStep`."""

    passed_over: set[int]
    """Iterations whose samples are skipped without training, as set by --iterations-to-skip or by extensions."""

    first_iteration: int
    """Iteration at which training begins in this process."""

    timers: StepTimers = field(default_factory=StepTimers)
    """Timing contexts around the parts of a step."""

    tasks: Sequence[Task] = ()
    """Periodic tasks of the run, in the order of execution."""

    interval: Interval = field(default_factory=Interval)
    """Values collected since the last log line."""

    measured: dict[str, float | None] = field(default_factory=dict)
    """Metrics measured at the current iteration, saved with that iteration's checkpoint."""
