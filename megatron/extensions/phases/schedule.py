"""Learning rate and weight decay of each stage, as functions of samples. No torch."""

from __future__ import annotations

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, ScheduleLength
from megatron.extensions.phases.plan import Stage, StagePlan


class StageScheduler(OptimizerParamScheduler):
    """A stage's own learning rate, which begins with the stage; weight decay is the whole run's."""

    def __init__(self, whole: OptimizerParamScheduler, own: OptimizerConfig, first_sample: int, samples: int) -> None:
        super().__init__(own, ScheduleLength.of(own, 1, 0, samples))
        self.whole, self.first_sample = whole, first_sample

    def _lr_at(self, samples: int, config: OptimizerConfig) -> float:
        # Skipped steps make the schedule lag behind the samples: the stage then begins late in it, never before it.
        return super()._lr_at(max(0, samples - self.first_sample), config)

    def weight_decay_at(self, samples: int) -> float:
        return self.whole.weight_decay_at(samples)


def whole_schedule(plan: StagePlan) -> OptimizerParamScheduler:
    """The schedule that the flags say, over the whole run. Raises ValueError where a length does not fit the run."""
    config, training = plan.base.optimizer, plan.base.training
    assert training.global_batch_size is not None
    if len(plan.stages) == 1 and plan.stages[0].entry is None:
        length = ScheduleLength.of(config, training.global_batch_size, plan.iterations, training.train_samples)
        return OptimizerParamScheduler(config, length)
    if training.train_samples is not None or training.train_tokens is not None:
        return OptimizerParamScheduler(config, ScheduleLength.of(config, 1, 0, plan.samples))
    # Lengths in iterations, whose numbers of samples may differ.
    at = plan.sizes.samples
    decay = plan.iterations if config.lr_decay_iters is None else config.lr_decay_iters
    warmup = float(at(config.lr_warmup_iters))
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * at(decay)
    anneal = at(decay) - at(max(0, decay - (config.lr_wsd_decay_iters or 0)))
    length = ScheduleLength(warmup=warmup, decay=float(at(decay)), anneal=float(anneal), total=float(plan.samples))
    return OptimizerParamScheduler(config, length)


def schedule_of(plan: StagePlan, stage: Stage) -> OptimizerParamScheduler:
    """The schedule of a stage: its own, or the run's."""
    whole = whole_schedule(plan)
    if stage.optimizer is None:
        return whole
    return StageScheduler(whole, stage.optimizer, stage.first_sample, stage.samples)
