"""The training loop: pretrain -> train -> train_step -> forward_backward -> PipelineExecutor.run.

Metrics stay on the device between log intervals; one reduction then makes them global, so every rank knows the
loss and every rank takes the same decisions.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from megatron.core.batch import Batch
from megatron.core.dist_checkpointing.storage import gather
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.pipeline_parallel.executor import StaleForwards
from megatron.extensions.diagnosis.straggler import GRAD_SYNC
from megatron.training.checks.bad_steps import settle
from megatron.training.checks.check_replicas import check_replicas
from megatron.training.config.run_config import RunConfig
from megatron.training.evaluation import evaluate
from megatron.training.forward_backward import Sums
from megatron.training.garbage_collection import GarbageCollection
from megatron.training.hooks import Parts, StepView
from megatron.training.initialize import (
    Runtime,
    StartupPhases,
    give_back_memory,
    initialize,
    limit_waits,
    shut_down,
    start_watchdog,
)
from megatron.training.metrics import megatron_format
from megatron.training.metrics.banner import banner
from megatron.training.metrics.interval import Interval, summarize
from megatron.training.metrics.run_log import RunLog
from megatron.training.progress import Step
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.watchdog import Watchdog
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run

GIVE_BACK_INTERVAL = 100
"""Iterations between two times that free pages go back to the system, on CPU."""


def pretrain(config: RunConfig, launch: Launch, parts: Parts | None = None) -> ExitCode:
    """Trains with a configuration that is resolved and validated for `launch.world_size`, and with `parts` of the
    caller's own beside those that extensions have registered.

    Returns the exit code. Any exception ends all ranks with one report."""
    watchdog = Watchdog(launch)
    runtime: Runtime | None = None
    built: TrainingRun | None = None
    with ExitStack() as resources:
        resources.callback(watchdog.close)
        try:
            start_watchdog(config, watchdog)
            together = partial(watchdog.together, minutes=config.parallel.startup_timeout_minutes)
            phases = StartupPhases(watchdog.begin, together)
            with phases("start of the ranks"):
                pass
            if config.checkpoint.save:  # it is this run's: rank 0 has found so before the ranks met
                watchdog.stacks.open(Path(config.checkpoint.save) / "stacks", launch.rank)
            runtime = initialize(config, launch, phases, watchdog)
            resources.callback(shut_down)
            run = built = build_run(config, runtime, parts)
            resources.callback(run.data.close)
            return train(run, resources)
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                from megatron.extensions.planner.out_of_memory import explain  # plans are made where they are needed

                explain(error, config, launch.world_size, runtime.state.pp.rank if runtime else 0, built)
            watchdog.fail(error)  # before resources close: that could wait for ranks that are gone


def train(run: TrainingRun, resources: ExitStack) -> ExitCode:
    """Trains until the end of the run, an exit condition, or an error."""
    config, progress, runtime, watchdog = run.config, run.progress, run.runtime, run.runtime.watchdog
    requests = watchdog.requests
    watchdog.status.executor = run.pipeline.executor
    watchdog.begin("opening the logs")
    if runtime.is_main:
        runtime.say("\n".join(banner(run)))
    runtime.say(str(runtime.phases))
    log = RunLog(run, resources)
    if config.logging.log_format == "megatron":
        own = (parameter.numel() for stage in run.stages.values() for parameter in stage.parameters())
        runtime.say(megatron_format.parameters_line(sum(own)))
    if progress.iteration:
        runtime.say(f" loaded checkpoint of iteration {progress.iteration} from {config.checkpoint.load}")
    elif config.checkpoint.reset_iteration and progress.loaded_from:
        runtime.say(f" loaded weights and optimizer state of {progress.loaded_from}: starting at iteration 0")
    elif config.checkpoint.load and not config.checkpoint.finetune:
        runtime.say(f" no checkpoint in --load {config.checkpoint.load}: starting at iteration 0")
    run.saver.prepare()
    for callback in run.callbacks:
        callback.on_start(run.view)
    collection = GarbageCollection(config.training, resources)
    interval = Interval()
    limit = partial(limit_waits, runtime, run.pipeline.executor.p2p)
    limit("--startup-timeout-minutes", config.parallel.startup_timeout_minutes)
    saved_at, startup = progress.iteration or None, True
    tasks_interval = config.eval_tasks.eval_tasks_interval
    tasks_interval = config.training.eval_interval if tasks_interval is None else tasks_interval
    if progress.iteration >= run.train_iters and not config.training.skip_train:
        longer = "to go on, raise --train-iters, --train-samples or --train-tokens"
        runtime.say(f" the run is complete: its {run.train_iters} iterations are trained; {longer}")
    while progress.iteration < run.train_iters and not config.training.skip_train:
        watchdog.begin(f"step {progress.iteration + 1}")
        if not requests.tick():
            if requests.stopping:
                break
            if saved_at != progress.iteration:
                with interval.outside():
                    save(run)
                saved_at = progress.iteration
            requests.done()
            continue
        run.plan.enter(run)
        train_step(run, interval)
        collection.after_step(progress.iteration)
        if startup:
            limit("--distributed-timeout-minutes", config.parallel.distributed_timeout_minutes)
            startup = False
        run.saver.report()
        for callback in run.callbacks:
            callback.on_step_end(run.view)
        may_stop = False
        iteration, last = progress.iteration, progress.iteration == run.train_iters
        if _due(iteration, GIVE_BACK_INTERVAL):
            give_back_memory(runtime.device)
        if last or _due(iteration, config.logging.log_interval) or run.plan.is_over(run):
            settle(run)
            record = summarize(run, interval)
            run.measured["lm_loss"] = record["lm_loss"]
            log.report_layers(interval.layers)
            log.report(record)
            for line in run.data.epochs.ended(progress.consumed_samples):
                runtime.say(f" {line}")
            for callback in run.callbacks:
                callback.on_log(run.view, record)
            may_stop = True
            interval = Interval()
        log.step()
        with interval.outside():
            if _due(iteration, config.training.check_replicas):
                check_replicas(run.stages.values(), run.optimizer, runtime.state)
            if run.data.valid and (last or _due(iteration, config.training.eval_interval)):
                with collection.around_evaluation():
                    evaluate(run, "valid", run.data.valid, log)
                may_stop = True
            if run.eval_tasks is not None and (last or _due(iteration, tasks_interval)):
                with collection.around_evaluation():
                    _evaluate_tasks(run, log)
                may_stop = True
            if config.checkpoint.save and _due(iteration, config.checkpoint.save_interval):
                save(run)
                saved_at = iteration
        if _due(iteration, config.training.exit_interval):
            runtime.say(f"exiting at iteration {iteration}: --exit-interval {config.training.exit_interval}")
            break
        if may_stop and run.callbacks and (why := _stop_reason(run)):
            runtime.say(f"exiting at iteration {iteration}: {why}")
            break
    trained = not config.training.skip_train
    if config.checkpoint.save and saved_at != progress.iteration and trained:
        save(run)
    if not trained and run.data.valid and not requests.stopping:
        with collection.around_evaluation():
            evaluate(run, "valid", run.data.valid, log)
    if not trained and run.eval_tasks is not None and not requests.stopping:
        with collection.around_evaluation():
            _evaluate_tasks(run, log)
    whole = progress.iteration >= run.train_iters or not trained
    if whole and run.data.test is not None and not requests.stopping:
        with collection.around_evaluation():
            evaluate(run, "test", {"": run.data.test}, log)
    settle(run)
    run.optimizer.finish_param_sync()  # no collective may be in progress when ranks leave
    run.saver.finish(hurry=requests.stopping)
    watchdog.begin("the end of callbacks")
    watchdog.complaint = _end_callbacks(run)
    watchdog.begin("leaving")
    if requests.stopping:
        runtime.say(f"exiting at iteration {progress.iteration}: {requests.why}")
    return watchdog.code


def _evaluate_tasks(run: TrainingRun, log: RunLog) -> None:
    """Evaluates --eval-tasks, whose files need yaml and jinja2: runs without tasks do not."""
    from megatron.extensions.evaluation.in_loop import evaluate_tasks

    evaluate_tasks(run, log)


def _end_callbacks(run: TrainingRun) -> str:
    """Calls `on_end` of all callbacks: the run has ended and is saved, so none may spoil that. Returns, on every rank,
    what the first one that raised says, which is printed; empty if none did. Collective."""
    raised = []
    for callback in run.callbacks:
        try:
            callback.on_end(run.view)
        except Exception as error:
            rank = run.runtime.launch.name(socket.gethostname())
            line = f"callback {type(callback).__name__} raised in on_end on {rank}: {type(error).__name__}: {error}"
            raised.append((line, traceback.format_exc()))
    found = [each for rank in gather(raised, run.runtime.state.world) for each in rank]
    for line, trace in found:
        run.runtime.say(f"{trace}the run has ended and is saved, but {line}")
    return found[0][0] if found else ""


def train_step(run: TrainingRun, interval: Interval, before_update: Callable[[], None] | None = None) -> None:
    """One optimizer step on one global batch. `before_update` is called when the gradients are final.

    Raises BadStepError, on every rank, if the step before ends the run."""
    progress, step = run.progress, run.progress.next_step(run.batch_sizes)
    if step.iteration in (run.config.checks.iterations_to_skip or ()):
        interval.passed_over += 1
        progress.skipped_iterations += 1
    else:
        _update(run, interval, step, before_update)
    run.measured.clear()
    progress.iteration += 1
    progress.consumed_samples += step.samples
    progress.data_fingerprint = run.data.fingerprint_at(progress.consumed_samples)


def _update(run: TrainingRun, interval: Interval, step: Step, before_update: Callable[[], None] | None) -> None:
    with run.clock("data"):
        batches = run.data.read_batches(step, log=True)
    sums = _gradients(run, step, batches)
    if settle(run):
        sums = _gradients(run, step, batches)
    with run.clock(GRAD_SYNC):
        factor = reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
    if before_update is not None:
        run.ddp.scale_grads_(factor)
        factor = torch.ones_like(factor)
        before_update()
    samples = run.progress.scheduled_samples  # settled: whether the step before counts is known
    lr, decoupled_lr = run.scheduler.lr_at(samples), run.scheduler.decoupled_lr_at(samples)
    weight_decay = run.scheduler.weight_decay_at(samples)
    ahead = run.config.optimizer.optimizer_post_validation and before_update is None
    ahead = ahead and likely_to_stand(run) and not _reads_result(run, step)
    run.layer_stats.before_update(factor)
    with run.clock("optimizer"):
        result = run.optimizer.step(
            lr,
            weight_decay,
            sums.loss_and_tokens,
            run.guard.judge,
            decoupled_lr,
            factor,
            on_update=run.forward_backward.end_step,
            ahead=ahead,
            moved=run.forward_backward.moved_by_end_step() if ahead else (),
        )
    run.layer_stats.after_update()
    run.guard.watch(step, result)
    if run.user_metrics.metrics:
        run.user_metrics.measure(StepView(run.view, batches, sums.loss_and_tokens), result.skip)
    interval.results.append(result)
    interval.losses.append(sums.loss_and_tokens)
    interval.learning_rate, interval.decoupled_lr = lr, decoupled_lr
    interval.batch_size = step.samples
    interval.samples += step.samples


def _gradients(run: TrainingRun, step: Step, batches: list[Batch]) -> Sums:
    """The gradients of a step; if the update before it is rolled back on the way, those of the parameters that are then
    there."""
    run.layer_stats.begin(step.iteration)
    try:
        return run.forward_backward(step, batches, run.optimizer.loss_scale)
    except StaleForwards:
        run.layer_stats.begin(step.iteration)
        return run.forward_backward(step, batches, run.optimizer.loss_scale)


def likely_to_stand(run: TrainingRun) -> bool:
    """Whether the step before was neither clipped nor skipped: if it was, so may be this one, and a step that waits for
    the norm costs less than one that is rolled back."""
    last, largest = run.guard.last, run.config.optimizer.clip_grad
    return last is None or not (last.skipped or (largest > 0 and last.grad_norm > largest))


def _reads_result(run: TrainingRun, step: Step) -> bool:
    """Whether somebody reads the result of a step, or its parameters, before the next one."""
    config, iteration = run.config, step.iteration
    intervals = (
        config.logging.log_interval,
        config.logging.log_layer_stats,
        config.training.check_replicas,
        config.training.eval_interval,
        config.eval_tasks.eval_tasks_interval,
        config.checkpoint.save_interval,
        config.training.exit_interval,
    )
    asked = bool(run.callbacks or run.user_metrics.metrics)
    return asked or iteration == run.train_iters or any(_due(iteration, interval) for interval in intervals)


def save(run: TrainingRun) -> None:
    """Starts a checkpoint of the present iteration. Collective."""
    settle(run)
    run.guard.store_means()
    run.saver.save(run.measured)
    for callback in run.callbacks:
        callback.on_checkpoint(run.view)


def _stop_reason(run: TrainingRun) -> str | None:
    """Why the run ends, if a callback of any rank has asked for it; equal on all ranks. Collective."""
    return next(filter(None, gather(run.view.stop_reason, run.runtime.state.world)), None)


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0
