"""Tasks that a run performs between steps and after the last step: periodic tasks, saves, evaluations, and the
callbacks' `on_end`."""

from __future__ import annotations

import gc
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from megatron.core.collectives import gather_objects
from megatron.training.config.run_config import TrainingConfig
from megatron.training.evaluation import evaluate
from megatron.training.hooks import Callback, Task
from megatron.training.initialize import give_back_memory, limit_waits
from megatron.training.metrics.banner import banner
from megatron.training.metrics.run_log import RunLog
from megatron.training.metrics.summary import summarize
from megatron.training.progress import SAVE, Interval
from megatron.training.run import TrainingRun

GIVE_BACK_INTERVAL = 100
"""Number of iterations after which a run on the CPU returns free pages to the system."""


def start_run(run: TrainingRun, resources: ExitStack) -> None:
    """Print a summary, open the logs, and build the tasks. The start-up time limit also covers the first step."""
    watchdog, parallel = run.runtime.watchdog, run.config.parallel
    watchdog.status.executor = run.pipeline.executor
    watchdog.doing("opening the logs")
    say_what_starts(run)
    log = RunLog(run, resources)
    run.saver.prepare()
    for callback in run.callbacks:
        callback.on_start(run)
    limit_waits(run.runtime, run.pipeline.executor.p2p, "--startup-timeout-minutes", parallel.startup_timeout_minutes)
    run.tasks = build_tasks(run, log, resources)


def build_tasks(run: TrainingRun, log: RunLog, resources: ExitStack) -> list[Task]:
    """Return the periodic tasks of a run in execution order. Tasks of extensions are performed before the save."""
    config = run.config
    first = run.progress.iteration + 1
    of_callbacks = [task for callback in run.callbacks for task in callback.tasks(run, log)]
    ends = [task for task in of_callbacks if task.ends_interval]
    interval_ends = lambda: any(task.is_due(run.progress.iteration, last=False) for task in ends)  # noqa: E731
    minutes = config.parallel.distributed_timeout_minutes
    limit = partial(limit_waits, run.runtime, run.pipeline.executor.p2p, "--distributed-timeout-minutes", minutes)
    after_first = lambda: run.progress.iteration == first  # noqa: E731
    watches = any(type(callback).on_step_end is not Callback.on_step_end for callback in run.callbacks)
    give_back = partial(give_back_memory, run.runtime.device)
    collection = GarbageCollection(config.training, resources)
    report = partial(_report, run, log)
    tasks = [
        Task("limit of waits", None, limit, also=after_first, counts=True, reads_result=False),
        Task("outcome of saves", 1, run.saver.report, counts=True, reads_result=False),
        Task("callbacks", 1, partial(_step_end, run), counts=True, reads_result=watches),
        Task("free memory", GIVE_BACK_INTERVAL, give_back, counts=True, reads_result=False),
        collection.task(),
        Task("log", config.logging.log_interval, report, at_end=True, also=interval_ends, counts=True, may_stop=True),
        Task("progress bar", 1, log.step, counts=True, reads_result=False),
    ]
    if run.data.valid:
        validate, interval = partial(evaluate, run, "valid", log), config.training.eval_interval
        tasks.append(Task("validation", interval, validate, at_end=True, may_stop=True, evaluates=True))
    tasks += of_callbacks
    if config.checkpoint.save:
        tasks.append(Task("save", config.checkpoint.save_interval, partial(save, run)))
    if run.data.test is not None:
        tasks.append(Task("test", None, partial(evaluate, run, "test", log), evaluates=True, at_finish=True))
    return [collection.around(task) if task.evaluates else task for task in tasks]


def _step_end(run: TrainingRun) -> None:
    for callback in run.callbacks:
        callback.on_step_end(run)


def _report(run: TrainingRun, log: RunLog) -> None:
    """Write the current interval's record, and begin the next interval."""
    run.guard.settle()
    record = summarize(run)
    run.measured["lm_loss"] = record["lm_loss"]
    log.report(record, run.meters)
    for callback in run.callbacks:
        callback.on_log(run, record)
    run.interval = Interval()


def save(run: TrainingRun) -> None:
    """Start saving a checkpoint of the current iteration. Collective."""
    run.guard.settle()
    run.guard.store_means()
    with run.timers(SAVE):
        run.saver.save(run.measured)
    for callback in run.callbacks:
        callback.on_checkpoint(run)


def say_what_starts(run: TrainingRun) -> None:
    """Print a summary of the run and the duration of start-up."""
    runtime = run.runtime
    if runtime.is_main:
        run.say("\n".join(banner(run)))
    run.say(str(runtime.phases))
    for line in run.lines.start(run):
        run.say(line)


def why_untrained(run: TrainingRun) -> str:
    """Return the reason why the run did not take any training steps."""
    if run.config.training.skip_train:
        return "--skip-train is given, as a flag or in the --config file"
    longer = "raise --train-iters, --train-samples or --train-tokens"
    longer = next((each.to_continue for each in run.callbacks if each.to_continue), longer)
    return f"the run is complete, its {run.train_iters} iterations are trained; to continue, {longer}"


def end_callbacks(run: TrainingRun) -> str:
    """Call `on_end` of all callbacks. Collective.

    The run has ended and is saved, so an exception in a callback must not change the run's result. The function prints
    the message of the first exception, and returns this message on every rank. Return an empty string if no callback
    raised an exception.
    """
    raised = []
    for callback in run.callbacks:
        try:
            callback.on_end(run)
        except Exception as error:
            rank = run.runtime.launch.name(socket.gethostname())
            line = f"callback {type(callback).__name__} raised in on_end on {rank}: {type(error).__name__}: {error}"
            raised.append((line, traceback.format_exc()))
    found = [each for rank in gather_objects(raised, run.runtime.state.world) for each in rank]
    for line, trace in found:
        run.say(f"{trace}the run has ended and is saved, but {line}")
    return found[0][0] if found else ""


class GarbageCollection:
    """Garbage collection during training. With --manual-gc, all ranks collect garbage at the same steps. Without
    --manual-gc, Python collects garbage whenever an allocation threshold is reached.

    In a large run, a garbage collection takes tenths of a second. With Python's thresholds, each rank collects garbage
    at different steps, and every collection delays all ranks. Automatic collection is off until `resources` is
    closed."""

    def __init__(self, config: TrainingConfig, resources: ExitStack) -> None:
        self.interval = config.manual_gc_interval if config.manual_gc else 0
        self.at_evaluations = config.manual_gc and config.manual_gc_eval
        if config.manual_gc and gc.isenabled():
            gc.disable()
            resources.callback(gc.enable)
            gc.collect()

    def task(self) -> Task:
        """Return the task that collects garbage between steps."""
        return Task("garbage collection", self.interval, gc.collect, counts=True, reads_result=False)

    def around(self, task: Task) -> Task:
        """Return a task that also collects garbage before and after `task`. With --no-manual-gc-eval, return `task`
        itself."""
        return replace(task, run=partial(self._between_collections, task.run)) if self.at_evaluations else task

    def _between_collections(self, run: Callable[[], object]) -> None:
        gc.collect()
        run()
        gc.collect()
