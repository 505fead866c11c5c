"""The training loop: pretrain -> train -> train_step -> forward_backward -> PipelineExecutor.run.

Within a log interval, metrics stay on the device. At a log line, one reduction combines the metrics of all ranks, so
that every rank has the same loss and makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

from megatron.core.collectives import gather_objects
from megatron.training.config.code_record import record_named_code
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Parts, Task, add_watches, tell_of_failure
from megatron.training.initialize import StartupPhases, connect, initialize, shut_down, start_watchdog
from megatron.training.progress import StepsTakenBackError
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.watchdog import Watchdog
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.tasks import end_callbacks, save, start_run, why_untrained
from megatron.training.train_step import train_step


def pretrain(config: RunConfig, launch: Launch, parts: Parts | None = None) -> ExitCode:
    """Train with a configuration that is resolved and validated for `launch.world_size`.

    The run also uses the callbacks and metrics that extensions have registered, in addition to `parts`. Return the
    exit code. Any exception ends all ranks with one report.
    """
    watchdog = Watchdog(launch)
    callbacks: Sequence[Callback] = ()
    built: TrainingRun | None = None
    with ExitStack() as resources:
        resources.callback(watchdog.close)
        try:
            connect(config, watchdog)
            parts = (parts or Parts()).with_registered(config)
            callbacks = parts.callbacks
            add_watches(callbacks, watchdog)
            start_watchdog(config, watchdog)
            together = partial(watchdog.together, minutes=config.parallel.startup_timeout_minutes)
            phases = StartupPhases(watchdog.doing, together)
            with phases("start of the ranks"):
                pass
            folder = config.checkpoint.save_folder
            if folder is not None:  # rank 0 has checked that no other run owns this folder
                watchdog.stacks.open(folder / "stacks", launch.rank)
            runtime = initialize(config, launch, phases, watchdog)
            resources.callback(shut_down)
            run = built = build_run(config, runtime, parts)
            resources.callback(run.data.close)
            if launch.local_rank == 0 and (why := record_named_code(config)) is not None:
                run.say(why)
            start_run(run, resources)
            return train(run)
        except BaseException as error:
            tell_of_failure(error, callbacks, launch, built)
            watchdog.fail(error)  # must precede the closing of `resources`, which may wait for missing ranks


def train(run: TrainingRun) -> ExitCode:
    """Train until the end of the run, an exit condition, or an error. Call `start_run` before this function."""
    while goes_on(run):
        pass
    finish(run)
    return run.runtime.watchdog.code


def goes_on(run: TrainingRun) -> bool:
    """Perform the next step, and run the tasks that are due after it. Return False if no further step follows."""
    try:
        if not next_step(run):
            return False
        train_step(run)
        return not exits(run, after=perform_due(run))
    except StepsTakenBackError as back:
        back.restore()
        return True


def next_step(run: TrainingRun) -> bool:
    """Return True if there is a next step, and False at the end of the run or after a request to stop. If a checkpoint
    is requested, the function also saves it."""
    requests = run.runtime.watchdog.requests
    while run.progress.iteration < run.train_iters and not run.config.training.skip_train:
        run.runtime.watchdog.doing(f"step {run.progress.iteration + 1}")
        if requests.tick():
            perform_due(run, before_step=True)
            return True
        if requests.stopping:
            return False
        if run.saver.last != run.progress.iteration:
            with run.interval.outside():
                save(run)
        requests.done()
    return False


def perform_due(run: TrainingRun, before_step: bool = False) -> list[Task]:
    """Perform the tasks that are due now. If `before_step` is True, these are the tasks before the next step.
    Otherwise, these are the tasks after the last step. Return the performed tasks."""
    iteration = run.progress.iteration
    tasks = [task for task in run.tasks if task.before_step == before_step]
    due = [task for task in tasks if task.is_due(iteration, last=iteration == run.train_iters)]
    for task in due:
        with nullcontext() if task.counts else run.interval.outside():
            task.run()
    return due


def exits(run: TrainingRun, after: Sequence[Task]) -> bool:
    """Return True if the run exits after these tasks, because of --exit-interval or because a callback on any rank has
    requested the exit. The result is equal on all ranks."""
    iteration, interval = run.progress.iteration, run.config.training.exit_interval
    why = f"--exit-interval {interval}" if interval and iteration % interval == 0 else None
    if why is None and run.callbacks and any(task.may_stop for task in after):
        why = next(filter(None, gather_objects(run.stop_reason, run.runtime.state.world)), None)
    if why is not None:
        run.say(f"exiting at iteration {iteration}: {why}")
    return why is not None


def finish(run: TrainingRun) -> None:
    """Finish the run: complete the work in progress, and perform the last save and evaluations."""
    watchdog, iteration = run.runtime.watchdog, run.progress.iteration
    requests, trains = watchdog.requests, not run.config.training.skip_train
    if trains and run.config.checkpoint.save and run.saver.last != iteration:
        save(run)
    complete = trains and iteration >= run.train_iters
    for task in run.tasks:
        if ((complete and task.at_finish) or (not trains and task.evaluates)) and not requests.stopping:
            task.run()
    run.step.finish()
    run.saver.finish(hurry=requests.stopping)
    watchdog.doing("the end of callbacks")
    watchdog.complaint = end_callbacks(run)
    watchdog.doing("leaving")
    if requests.stopping:
        run.say(f"exiting at iteration {iteration}: {requests.why}")
    elif iteration == run.first_iteration:
        run.say(f" nothing was trained: {why_untrained(run)}")
