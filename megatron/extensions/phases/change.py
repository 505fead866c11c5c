"""Takes a run from one stage to another: data, shapes, positions and schedule. The parameters stay."""

from __future__ import annotations

from dataclasses import replace

from megatron.extensions.phases.schedule import schedule_of
from megatron.training.pipeline import hidden_shape
from megatron.training.run import TrainingRun


def enter_stage_of(run: TrainingRun) -> None:
    """Goes on with the stage of the next step, if the run is not in it. On every rank, between two steps."""
    number = run.plan.number_at(run.progress.consumed_samples)
    if number != run.stage:
        enter_stage(run, number)
        stage = run.plan.stages[number]
        so_far = run.data.epochs.line(run.progress.consumed_samples)
        line = f" stage {stage.name} begins with iteration {run.progress.iteration + 1}"
        run.runtime.say(f"{line}; epochs so far: {so_far}" if so_far else line)


def enter_stage(run: TrainingRun, number: int) -> None:
    """Makes the run's parts those of a stage."""
    stage = run.plan.stages[number]
    config = run.config = stage.config
    run.stage = number
    run.forward_backward = replace(run.forward_backward, config=config)
    run.pipeline.executor.p2p.shape = hidden_shape(config, run.runtime.state.tp.size)
    for model in run.stages.values():
        model.set_positions(config.model)
    run.scheduler = schedule_of(run.plan, stage)
    run.data.enter(number)


def stage_is_over(run: TrainingRun) -> bool:
    """Whether the next step is another stage's."""
    return run.plan.number_at(run.progress.consumed_samples) != run.stage
