"""The parts of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.training.checkpoints.saving import RunSaver
from megatron.training.config.batch_size import BatchSizes
from megatron.training.data import TrainingData
from megatron.training.forward_backward import ForwardBackward, Pipeline, StepInput
from megatron.training.hooks import Callback, Meter, RunView, Task
from megatron.training.initialize import Runtime
from megatron.training.metrics.console import LogLines
from megatron.training.plan import RunPlan
from megatron.training.progress import Interval, StepTimers
from megatron.training.step_guard import StepGuard


@dataclass(kw_only=True)
class TrainingRun(RunView):
    """Owns the parts of a run on one rank. The loop holds it; other functions take the parts they use.

    `config` is that of the current phase; `plan.base` is the one that the flags say. `progress` and `interval` change
    with every step, the other parts are built once."""

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
    timers: StepTimers
    callbacks: Sequence[Callback]
    meters: Sequence[Meter]
    """All that is counted during passes and reported at log lines."""

    first_iteration: int
    """Iteration at which this process started."""

    tasks: Sequence[Task] = ()
    """The periodic tasks, in the order in which they are performed."""

    interval: Interval = field(default_factory=Interval)
    """The steps since the last log line."""

    begun: StepInput | None = None
    """Inputs of the next step, if its passes have begun."""

    measured: dict[str, float | None] = field(default_factory=dict)
    """Metrics measured at the current iteration; saved with its checkpoint."""
