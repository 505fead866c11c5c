"""The training loop: pretrain -> train -> train_step -> PipelineExecutor.run.

Metrics stay on the device between log intervals; one reduction then makes them global, so every rank knows the
loss and every rank takes the same decisions.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.model_math import flops_per_token
from megatron.core.optimizer.optimizer import StepResult
from megatron.training.config.arguments import save_config, to_flat_dict
from megatron.training.config.run_config import RunConfig
from megatron.training.data import put_on_device
from megatron.training.diagnosis.check_replicas import check_replicas
from megatron.training.diagnosis.step_guard import is_nan
from megatron.training.diagnosis.straggler import GRAD_SYNC, hosts_of_ranks, straggler_line, straggler_record
from megatron.training.forward_backward import Step, count_tokens, forward_backward, loss_and_tokens, read_batches
from megatron.training.garbage_collection import GarbageCollection
from megatron.training.initialize import (
    StartupPhases,
    give_back_memory,
    initialize,
    limit_waits,
    shut_down,
    start_watch,
)
from megatron.training.metrics import Record, Sink, open_sinks, peak_memory_bytes, peak_tflops, progress_line
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.watchdog import Watch
from megatron.training.saving import finish_saves, prepare_to_save, save, tell_of_saves
from megatron.training.setup import TrainingRun, build_run

CONFIG_FILE = "run_config.yaml"


def pretrain(config: RunConfig, launch: Launch) -> ExitCode:
    """Trains as `config` says, resolved and validated for `launch.world_size`. A failure ends all ranks."""
    watch = Watch(launch)
    with ExitStack() as resources:
        resources.callback(watch.close)
        try:
            start_watch(config, watch)
            together = partial(watch.together, minutes=config.parallel.startup_timeout_minutes)
            phases = StartupPhases(watch.begin, together)
            with phases("start of the ranks"):
                pass
            runtime = initialize(config, launch, phases, watch)
            resources.callback(shut_down)
            run = build_run(config, runtime)
            resources.callback(run.data.close)
            return train(run, resources)
        except BaseException as error:
            watch.fail(error)  # at once: closing what is open may wait for ranks that are gone


@dataclass
class Interval:
    """What happened since the last log line. Device tensors; nothing here waits for the device."""

    start: float = field(default_factory=time.perf_counter)
    losses: list[torch.Tensor] = field(default_factory=list)
    """Per iteration [loss sum, tokens] of this rank; zeros where another rank counts them."""
    results: list[StepResult] = field(default_factory=list)
    passed_over: int = 0
    """Iterations of --iterations-to-skip."""
    excluded: float = 0.0
    """Seconds that were not training."""
    learning_rate: float = 0.0
    batch_size: int = 0
    samples: int = 0

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What happens in here is not training and does not count in the step time."""
        began = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - began

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.excluded


def train(run: TrainingRun, resources: ExitStack) -> ExitCode:
    """Iterates until the run's length, an exit condition, or an error."""
    config, progress, watch = run.config, run.progress, run.runtime.watch
    watch.actions = run.pipeline.executor
    watch.begin("opening the logs")
    sinks = _open_sinks(run, resources)
    runtime = run.runtime
    runtime.say(str(runtime.phases))
    if progress.iteration:
        runtime.say(f" loaded checkpoint of iteration {progress.iteration} from {config.checkpoint.load}")
    elif config.checkpoint.load and not config.checkpoint.finetune:
        runtime.say(f" no checkpoint in --load {config.checkpoint.load}: starting at iteration 0")
    if run.sample_log is not None:
        resources.callback(run.sample_log.close)
    bar = _progress_bar(run, resources)
    hosts = hosts_of_ranks(runtime.state.world) if config.logging.log_straggler else []
    prepare_to_save(run)
    collection = GarbageCollection(config.training, resources)
    interval = Interval()
    limit = partial(limit_waits, runtime, run.pipeline.executor.p2p)
    limit("--startup-timeout-minutes", config.parallel.startup_timeout_minutes)
    saved_at, startup = progress.iteration or None, True
    while progress.iteration < run.train_iters:
        watch.begin(f"step {progress.iteration + 1}")
        if not watch.tick():
            if watch.stopping:
                break
            if saved_at != progress.iteration:
                with interval.outside():
                    save(run)
                saved_at = progress.iteration
            watch.done()
            continue
        train_step(run, interval)
        collection.after_step(progress.iteration)
        if startup:
            limit("--distributed-timeout-minutes", config.parallel.distributed_timeout_minutes)
            startup = False
        tell_of_saves(run)
        iteration, last = progress.iteration, progress.iteration == run.train_iters
        if last or _due(iteration, config.logging.log_interval):
            run.guard.settle(run)
            report(run, sinks, summarize(run, interval), bar, hosts)
            interval = Interval()
        if bar is not None:
            bar.update(1)
        with interval.outside():
            if _due(iteration, config.training.check_replicas):
                check_replicas(run)
            if run.data.valid is not None and (last or _due(iteration, config.training.eval_interval)):
                with collection.around_evaluation():
                    evaluate_and_report(run, "valid", sinks)
            if config.checkpoint.save and _due(iteration, config.checkpoint.save_interval):
                save(run)
                saved_at = iteration
        if _due(iteration, config.training.exit_interval):
            runtime.say(f"exiting at iteration {iteration}: --exit-interval {config.training.exit_interval}")
            break
    if config.checkpoint.save and saved_at != progress.iteration:
        save(run)
    if progress.iteration >= run.train_iters and run.data.test is not None and not watch.stopping:
        with collection.around_evaluation():
            evaluate_and_report(run, "test", sinks)
    run.guard.settle(run)
    run.optimizer.finish_param_sync()  # nothing may be under way when ranks leave
    finish_saves(run)
    watch.begin("leaving")
    if not watch.stopping:
        return ExitCode.DONE
    runtime.say(f"exiting at iteration {progress.iteration}: {watch.why}")
    return ExitCode.TO_BE_RESUMED if watch.resumes else ExitCode.DONE


def train_step(run: TrainingRun, interval: Interval, before_update: Callable[[], None] | None = None) -> None:
    """One optimizer step on one global batch. `before_update` is called when the gradients are final.

    Raises BadStepError, on every rank, if the step before ends the run."""
    step, progress = Step.next_of(run), run.progress
    if step.iteration in (run.config.checks.iterations_to_skip or ()):
        interval.passed_over += 1
        progress.skipped_iterations += 1
    else:
        _update(run, interval, step, before_update)
    run.measured.clear()
    progress.iteration += 1
    progress.consumed_samples += step.samples


def _update(run: TrainingRun, interval: Interval, step: Step, before_update: Callable[[], None] | None) -> None:
    with run.clock("data"):
        batches = read_batches(run, step, log=True)
    sums = forward_backward(run, step, batches)
    if run.guard.settle(run):
        sums = forward_backward(run, step, batches)
    with run.clock(GRAD_SYNC):
        finalize_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
    if before_update is not None:
        before_update()
    lr = run.scheduler.lr_at(step.first_sample)
    weight_decay = run.scheduler.weight_decay_at(step.first_sample)
    with run.clock("optimizer"):
        result = run.optimizer.step(lr, weight_decay, sums.loss_and_tokens, run.guard.judge)
    run.guard.watch(step, result)
    run.experts.end_step(result.skip)
    run.scaling.end_step(result.skip)
    interval.results.append(result)
    interval.losses.append(sums.loss_and_tokens)
    interval.learning_rate = lr
    interval.batch_size = step.samples
    interval.samples += step.samples


def summarize(run: TrainingRun, interval: Interval) -> Record:
    """The record of an interval, equal on every rank. The one place in the loop that waits for the device."""
    config, runtime = run.config, run.runtime
    world = runtime.launch.world_size
    # One reduction for everything: each rank has a row of its own, so that a sum carries every rank's numbers.
    own = [peak_memory_bytes(runtime.device), *(run.clock.take() if run.clock.enabled else ())]
    of_ranks = torch.zeros(world, len(own), dtype=torch.float64, device=runtime.device)
    of_ranks[runtime.launch.rank] = torch.tensor(own, dtype=torch.float64)
    losses = torch.stack([*interval.losses, torch.zeros(2, dtype=torch.float64, device=runtime.device)])
    gathered = [losses.flatten(), run.experts.take(), of_ranks.flatten()]
    summed = torch.cat(gathered)
    if world > 1:
        dist.all_reduce(summed)
    table, expert_load, of_ranks = summed.split([part.numel() for part in gathered])
    table, of_ranks = table.view(-1, 2)[:-1], of_ranks.view(world, -1)
    steps = len(interval.results)
    skipped = [result.skipped for result in interval.results]
    counted = table[[not skip for skip in skipped]]
    total, tokens = counted.sum(dim=0).tolist()
    seconds = interval.seconds()
    tokens_per_second = interval.samples * config.model.seq_length / seconds
    tflops = tokens_per_second * flops_per_token(config.model) / world / 1e12
    peak = peak_tflops(config.logging, runtime.device, run.dtype, config.parallel.fp8_format is not None)
    return {
        "iteration": run.progress.iteration,
        "consumed_samples": run.progress.consumed_samples,
        "consumed_tokens": run.progress.consumed_samples * config.model.seq_length,
        "lm_loss": total / tokens if tokens else None,
        "grad_norm": interval.results[-1].grad_norm if steps else None,
        "learning_rate": interval.learning_rate,
        "global_batch_size": interval.batch_size,
        "loss_scale": interval.results[-1].loss_scale if steps else run.optimizer.loss_scale,
        "skipped_iterations": sum(skipped) + interval.passed_over,
        "nan_iterations": sum(map(is_nan, interval.results)),
        "spike_iterations": sum(result.spike for result in interval.results),
        "tokens_per_second": tokens_per_second,
        "tflops_per_device": tflops,
        "mfu": tflops / peak if peak else None,
        "step_time": seconds / max(steps, 1),
        "peak_memory_bytes": int(of_ranks[:, 0].max()),
        **(run.experts.record(expert_load, interval.samples * config.model.seq_length) if steps else {}),
        **straggler_record(of_ranks[:, 1:].tolist(), steps, config.logging),
    }


def report(run: TrainingRun, sinks: list[Sink], record: Record, bar: tqdm | None, hosts: Sequence[str] = ()) -> None:
    """Prints and writes a record, on the rank that speaks for the run."""
    give_back_memory(run.runtime.device)
    run.measured["lm_loss"] = record["lm_loss"]
    for sink in sinks:
        sink.write(record)
    line = "\n".join([progress_line(record, run.train_iters), *straggler_line(record, hosts)])
    if bar is not None:
        bar.write(line)
        if record["lm_loss"] is not None:
            bar.set_postfix(loss=f"{record['lm_loss']:.4f}")
    else:
        run.runtime.say(line)


@torch.no_grad()
def evaluate(run: TrainingRun, split: str) -> float | None:
    """Mean loss per token over `eval_iters` global batches of a split, equal on every rank. No dropout.

    None if the run is to stop before the evaluation is over."""
    training = run.config.training
    iterator = getattr(run.data, split)
    assert training.global_batch_size is not None
    for stage in run.stages.values():
        stage.eval()
    total = torch.zeros(2, dtype=torch.float64, device=run.runtime.device)
    for step in range(training.eval_iters):
        if not run.runtime.watch.tick(save_later=True):
            break
        first = run.data.evaluated[split] + step * training.global_batch_size
        batches = put_on_device(iterator.next_step(first, training.global_batch_size), run.runtime)
        losses = run.pipeline.evaluate(batches)
        total += loss_and_tokens(run, losses, count_tokens(batches))
    for stage in run.stages.values():
        stage.train()
    if run.runtime.launch.world_size > 1:
        dist.all_reduce(total)
    if run.runtime.watch.stopping:
        return None
    loss, tokens = total.tolist()
    return loss / tokens if tokens else 0.0


def evaluate_and_report(run: TrainingRun, split: str, sinks: list[Sink]) -> None:
    """Evaluates, prints, and writes a record with `valid_loss` or `test_loss` and its perplexity."""
    training, progress = run.config.training, run.progress
    assert training.global_batch_size is not None
    if split == "valid":
        evaluations = (progress.iteration - 1) // training.eval_interval
        run.data.evaluated[split] = evaluations * training.eval_iters * training.global_batch_size
    run.runtime.watch.begin(f"evaluation ({split}) at iteration {progress.iteration}")
    loss = evaluate(run, split)
    if loss is None:
        return
    run.measured[f"{split}_loss"] = loss
    perplexity = math.exp(loss) if loss < 700 else math.inf
    for sink in sinks:
        sink.write({"iteration": progress.iteration, f"{split}_loss": loss, f"{split}_perplexity": perplexity})
    run.runtime.say(
        f" {split} loss at iteration {progress.iteration} | lm loss: {loss:.6E} | lm loss PPL: {perplexity:.6E}"
    )


def _open_sinks(run: TrainingRun, resources: ExitStack) -> list[Sink]:
    """The sinks and the resolved configuration's file, on the rank that speaks for the run; elsewhere none."""
    if not run.runtime.is_main:
        return []
    save_folder = run.config.checkpoint.save
    if save_folder:
        Path(save_folder).mkdir(parents=True, exist_ok=True)
        save_config(run.config, Path(save_folder) / CONFIG_FILE)
    sinks = open_sinks(run.config.logging, save_folder, run.progress.iteration, to_flat_dict(run.config))
    for sink in sinks:
        resources.callback(sink.close)
        run.runtime.watch.at_exit.append(sink.close)
    return sinks


def _progress_bar(run: TrainingRun, resources: ExitStack) -> tqdm | None:
    """A bar with the time left, where a person is watching."""
    if not (run.runtime.is_main and sys.stderr.isatty()):
        return None
    bar = tqdm(total=run.train_iters, initial=run.progress.iteration, unit="it", dynamic_ncols=True)
    resources.callback(bar.close)
    return bar


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0
