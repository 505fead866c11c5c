"""Transition of a run from one phase to the next. The data, shapes, positions and learning rate schedule change, but
the parameters do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.extensions.data.phases.epochs import epochs_so_far
from megatron.extensions.data.phases.file_phase import FilePhase
from megatron.extensions.data.phases.plan import PhasePlan
from megatron.training.forward_backward import hidden_shape
from megatron.training.hooks import Callback, Log, Meter, Task
from megatron.training.run import TrainingRun


class EntersPhases(Callback):
    """Callback that switches a run to the phase of its next step."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        enter_phase(run)
        return ()

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        enter, also = partial(enter_phase, run), partial(is_over, run)
        return [Task("next phase", None, enter, also=also, counts=True, before_step=True, ends_interval=True)]


def enter_phase(run: TrainingRun) -> None:
    """Enter the phase of the next step, unless the run is already in this phase. Every rank calls this function between
    two steps."""
    assert isinstance(run.plan, PhasePlan)
    # An evaluation-only run uses the data of the phase in which the model was last trained.
    phase = run.plan.at(run.progress.consumed_samples - run.plan.base.training.skip_train)
    if run.config is not phase.config:
        assert isinstance(phase, FilePhase)
        change_phase(run, phase, run.plan.schedule_of(phase))


def is_over(run: TrainingRun) -> bool:
    """Return True if the run's current phase is over, so that the next step belongs to a different phase."""
    return run.config is not run.plan.at(run.progress.consumed_samples).config


def change_phase(run: TrainingRun, phase: FilePhase, schedule: OptimizerParamScheduler) -> None:
    """Switch the run to the configuration, data and learning-rate schedule of `phase`."""
    started = run.config is not run.plan.base
    config = run.config = phase.config
    run.forward_backward = replace(run.forward_backward, config=config)
    run.pipeline.executor.p2p.shape = hidden_shape(config, run.runtime.state.tp.size)
    for model in run.stages.values():
        model.set_positions(config.model)
    run.scheduler = schedule
    run.data.train.restrict(phase.first_sample + phase.samples, config.training.micro_batch_size)
    run.data.enter(phase)
    if started:
        so_far = epochs_so_far(run)
        line = f" phase {phase.name} begins with iteration {run.progress.iteration + 1}"
        run.runtime.say(f"{line}; epochs so far: {so_far}" if so_far else line)
