"""The parts of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.extensions.diagnosis.layer_stats.statistics import LayerStatistics
from megatron.extensions.diagnosis.straggler import PhaseClock
from megatron.training.checks.step_guard import StepGuard
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.run_config import RunConfig
from megatron.training.data import TrainingData
from megatron.training.forward_backward import ForwardBackward
from megatron.training.hooks import Callback, RunView
from megatron.training.initialize import Runtime
from megatron.training.metrics.expert_load import ExpertLoad
from megatron.training.metrics.model_sums import ModelSums
from megatron.training.metrics.user_metrics import UserMetrics
from megatron.training.pipeline import Pipeline
from megatron.training.plan import RunPlan
from megatron.training.progress import Progress
from megatron.training.saving import RunSaver

if TYPE_CHECKING:
    from megatron.extensions.evaluation.suite import Suite


@dataclass
class TrainingRun:
    """Owns the parts of a run on one rank. The loop holds it; other functions take the parts they use."""

    config: RunConfig
    """That of the present phase; `plan.base` is the one that the flags say."""

    plan: RunPlan
    runtime: Runtime
    stages: dict[int, GPTModel]
    ddp: DistributedDataParallel
    optimizer: DistributedOptimizer
    scheduler: OptimizerParamScheduler
    pipeline: Pipeline
    forward_backward: ForwardBackward
    data: TrainingData
    eval_tasks: Suite | None
    """What --eval-tasks names."""

    batch_sizes: BatchSizes
    train_iters: int
    progress: Progress
    """Changes with every step; the other parts are built once."""

    experts: ExpertLoad
    sums: ModelSums
    layer_stats: LayerStatistics
    saver: RunSaver
    guard: StepGuard
    clock: PhaseClock
    callbacks: Sequence[Callback]
    user_metrics: UserMetrics
    view: RunView
    """What callbacks and metrics see of this run."""

    measured: dict[str, float | None] = field(default_factory=dict)
    """Metrics measured at the present iteration; saved with its checkpoint."""
