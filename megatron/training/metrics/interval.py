"""Statistics of one log interval: loss, gradient norm, throughput, MFU, peak memory, expert load, slow ranks.

Values stay on the device during the interval. `summarize` then makes them global with one reduction.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.core.collectives import all_reduce_
from megatron.core.optimizer.distrib_optimizer import StepResult
from megatron.extensions.diagnosis.layer_stats.records import LayerRecord
from megatron.extensions.diagnosis.straggler import straggler_record
from megatron.training.checks.step_guard import is_nan
from megatron.training.metrics.mfu import utilization
from megatron.training.metrics.sinks import Record
from megatron.training.run import TrainingRun


@dataclass
class Interval:
    """Collects the steps since the last log line. Holds device tensors and never waits for the device."""

    start: float = field(default_factory=time.perf_counter)
    losses: list[torch.Tensor] = field(default_factory=list)
    """Per iteration [loss sum, tokens] of this rank; zeros where another rank counts them."""
    results: list[StepResult] = field(default_factory=list)
    passed_over: int = 0
    """Iterations left out by --iterations-to-skip."""
    excluded: float = 0.0
    """Seconds spent on anything but training, such as evaluation."""
    learning_rate: float = 0.0
    decoupled_lr: float | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    """Statistics of layers, once the interval has been summarized."""
    batch_size: int = 0
    samples: int = 0

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Excludes the time spent in this block from the step time."""
        began = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - began

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.excluded


def summarize(run: TrainingRun, interval: Interval) -> Record:
    """The record of an interval, equal on every rank. Collective; waits for the device."""
    config, runtime = run.config, run.runtime
    world = runtime.launch.world_size
    # One reduction for everything: each rank has a row of its own, so that a sum carries every rank's numbers.
    own = [peak_memory_bytes(runtime.device), *(run.clock.take() if run.clock.enabled else ())]
    of_ranks = torch.zeros(world, len(own), dtype=torch.float64, device=runtime.device)
    of_ranks[runtime.launch.rank] = torch.tensor(own, dtype=torch.float64)
    losses = torch.stack([*interval.losses, torch.zeros(2, dtype=torch.float64, device=runtime.device)])
    multi_token = run.forward_backward.multi_token
    sources = run.forward_backward.sources
    gathered = [
        losses.flatten(),
        multi_token.take(),
        sources.take(),
        run.experts.take(),
        run.user_metrics.take(),
        run.sums.take(),
        run.layer_stats.take(),
        of_ranks.flatten(),
    ]
    summed = all_reduce_(torch.cat(gathered), runtime.state.world)
    parts = summed.split([part.numel() for part in gathered])
    table, further, by_source, expert_load, user_metrics, sums, layers, of_ranks = parts
    table, of_ranks = table.view(-1, 2)[:-1], of_ranks.view(world, -1)
    interval.layers = run.layer_stats.records(layers)
    steps = len(interval.results)
    skipped = [result.skipped for result in interval.results]
    counted = table[[not skip for skip in skipped]]
    total, tokens = counted.sum(dim=0).tolist()
    seconds = interval.seconds()
    tokens_per_second = interval.samples * config.model.seq_length / seconds
    samples_left = run.batch_sizes.samples(run.train_iters) - run.progress.consumed_samples
    record = {
        "iteration": run.progress.iteration,
        "consumed_samples": run.progress.consumed_samples,
        "consumed_tokens": run.plan.tokens(run.progress.consumed_samples),
        "lm_loss": total / tokens if tokens else None,
        **multi_token.record(further),
        **sources.record(by_source),
        "grad_norm": interval.results[-1].grad_norm if steps else None,
        "learning_rate": interval.learning_rate,
        **({} if interval.decoupled_lr is None else {"decoupled_learning_rate": interval.decoupled_lr}),
        "global_batch_size": interval.batch_size,
        "loss_scale": interval.results[-1].loss_scale if steps else run.optimizer.loss_scale,
        "skipped_iterations": sum(skipped) + interval.passed_over,
        "nan_iterations": sum(map(is_nan, interval.results)),
        "spike_iterations": sum(result.spike for result in interval.results),
        "tokens_per_second": tokens_per_second,
        **utilization(config, runtime.device, tokens_per_second, world),
        "step_time": seconds / max(steps, 1),
        "seconds_left": samples_left * config.model.seq_length / tokens_per_second if tokens_per_second else None,
        "peak_memory_bytes": int(of_ranks[:, 0].max()),
        **(run.experts.record(expert_load, interval.samples * config.model.seq_length) if steps else {}),
        **run.sums.record(sums),
        **straggler_record(of_ranks[:, 1:].tolist(), steps, config.logging),
    }
    own_metrics = run.user_metrics.record(user_metrics)
    if taken := sorted(record.keys() & own_metrics.keys()):
        raise ValueError(f"metric {taken[0]}: every record has a value of this name; register it under another one")
    return record | own_metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the CUDA allocator, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
