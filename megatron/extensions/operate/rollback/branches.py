"""Branches of a run. A branch loads a checkpoint of the run and repeats the steps that follow. A branch may use fewer
ranks, replace samples or bound the learning rate.

Sample order, dropout and learning rates do not depend on the parallel layout of a run. Therefore, a branch without
changes computes the same losses as the run, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from io import StringIO
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.collectives import all_reduce_
from megatron.core.config.parallel import ModelParallelConfig, PrecisionConfig
from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_order import SampleOrder, documents_of, sources_of
from megatron.core.datasets.samplers import collate
from megatron.core.dist_checkpointing.path_kind import RUN_CONFIG
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ParallelState
from megatron.extensions.operate.peer_copies.flags import PeerCopyConfig
from megatron.extensions.operate.rollback.flags import RollbackFlags
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args, save_config
from megatron.training.config.run_config import CheckpointConfig, ChecksConfig, LoggingConfig, RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.data import put_on_device
from megatron.training.forward_backward import count_tokens, loss_and_tokens
from megatron.training.initialize import Runtime, choose_device, local_runtime, set_determinism
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.train_step import train_step


@dataclass(frozen=True)
class Change:
    """Difference between a branch and the original run. With the default values, there is no difference."""

    samples: Mapping[int, int] | None = None
    """Maps the index of each replaced sample to the index of its replacement."""

    rate: float | None = None
    """Upper bound on the learning rate; None for no bound."""

    looks_at: int | None = None
    """Iteration at which the loss of each document is measured. The losses are measured on the samples of this
    iteration, before the weights are updated."""


@dataclass(frozen=True)
class Part:
    """Part of a sample that belongs to one document."""

    sample: int
    origin: str
    """Origin of the part, in the form `dataset:document+token`."""

    loss: float
    """Mean loss over the labels of this part of the sample."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """Values recorded in a branch, keyed by iteration: losses, gradient norms, learning rates and samples."""

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    samples: dict[int, range] = field(default_factory=dict)
    """Maps an iteration to its range of sample indices."""

    parts: tuple[Part, ...] = ()
    """Parts of the samples of the iteration `Change.looks_at`, one for each document in a sample, with their losses."""


class Swapped(SampleOrder):
    """Sample order in which some samples are replaced."""

    def __init__(self, inner: Dataset, samples: Mapping[int, int]) -> None:
        self.inner, self.taken = inner, samples
        self.samples, self.fingerprint = len(inner), inner.fingerprint

    def place(self, index: int) -> tuple[Dataset, int]:
        return self.inner, self.taken.get(index, index)

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        return sources_of(self.inner, samples)


@dataclass(frozen=True)
class HeldRate:
    """Learning rate schedule that follows the schedule of a run, but does not exceed the rate `most`."""

    inner: OptimizerParamScheduler
    most: float

    def lr_at(self, samples: int) -> float:
        return min(self.most, self.inner.lr_at(samples))

    def decoupled_lr_at(self, samples: int) -> float | None:
        own = self.inner.decoupled_lr_at(samples)
        return None if own is None else own * self.lr_at(samples) / self.inner.lr_at(samples)

    def weight_decay_at(self, samples: int) -> float:
        return self.inner.weight_decay_at(samples)


def config_of(run: Path, checkpoint: Path, flags: Sequence[str]) -> RunConfig:
    """Return the configuration for branches of a run, before defaults are filled in. The parallel layout of the run is
    dropped, its precision flags are kept, and `flags` are added. Raises ValueError if the flags are invalid."""
    config = parse_args(["--config", str(run / RUN_CONFIG)])
    kept = {each.name: getattr(config.parallel, each.name) for each in fields(PrecisionConfig)}
    config = replace(
        config,
        parallel=ModelParallelConfig(**kept, cpu=config.parallel.cpu),
        training=replace(config.training, eval_iters=0, num_microbatches=None),
        checks=ChecksConfig(False, iterations_to_skip=config.checks.iterations_to_skip),
        logging=LoggingConfig(),
        checkpoint=CheckpointConfig(load=str(checkpoint)),
    )
    config = config.with_options(RollbackFlags()).with_options(PeerCopyConfig())
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / RUN_CONFIG
        save_config(config, path)
        return parse_args(["--config", str(path), *flags])


def branch(config: RunConfig, world_size: int | None, last: int, change: Change) -> Outcome:
    """Run a branch: load a checkpoint according to `config`, and train up to the iteration `last`. The default for
    `world_size` is the smallest number of ranks that the configuration permits. If there are several ranks, they run as
    processes on this machine's CPU."""
    parallel = config.parallel
    own = parallel.pipeline_model_parallel_size * parallel.expert_model_parallel_size * parallel.expert_tp
    ranks = world_size or lcm(parallel.model_parallel_size, own)
    config = resolve_legal(config, ranks)
    if ranks == 1:
        with redirect_stdout(StringIO()):
            return _on_rank(0, 1, config, last, change)
    with redirect_stdout(StringIO()):  # the processes of the ranks inherit the redirected stdout
        return run_world(ranks, _on_rank, config, last, change, timeout=86400.0)[0]


def _on_rank(rank: int, world_size: int, config: RunConfig, last: int, change: Change) -> Outcome:
    set_determinism(config)
    if world_size == 1:
        runtime = Runtime(Launch(), choose_device(config.parallel, Launch()), ParallelState())
    else:
        runtime = local_runtime(config, rank, world_size)
    run = build_run(config, runtime)
    if change.samples:
        run.data.train.dataset = Swapped(run.data.train.dataset, change.samples)
    if change.rate is not None:
        run.scheduler = HeldRate(run.scheduler, change.rate)  # type: ignore[assignment]
    found = Outcome()
    parts = list[Part]()
    try:
        while run.progress.iteration < min(last, run.train_iters):
            step = run.progress.next_step(run.batch_sizes)
            if step.iteration == change.looks_at:
                run.optimizer.finish_param_sync()
                parts = losses_of(run, range(step.first_sample, step.first_sample + step.samples))
            _make_step(run, found)
    finally:
        run.step.finish()
        run.data.close()
    return replace(found, parts=tuple(parts))


def _make_step(run: TrainingRun, found: Outcome) -> None:
    """Run the next step, and add its sample indices, loss, gradient norm and learning rate to `found`. If the run skips
    the batch of the step, add only the sample indices."""
    step = run.progress.next_step(run.batch_sizes)
    train_step(run)
    run.guard.settle()
    found.samples[step.iteration] = range(step.first_sample, step.first_sample + step.samples)
    if step.iteration not in run.passed_over:
        result = run.interval.results[-1]
        total, tokens = result.sums
        found.losses[step.iteration] = total / max(tokens, 1.0)
        found.norms[step.iteration] = result.grad_norm
        found.rates[step.iteration] = run.interval.learning_rate


def losses_of(run: TrainingRun, samples: range) -> list[Part]:
    """Return the mean loss of each document in the samples, with the current weights. A document that spans several
    samples yields one `Part` per sample. Collective."""
    found = list[Part]()
    dataset = run.data.train.dataset
    with run.pipeline.evaluation_mode(), torch.no_grad():
        for sample in samples:
            at, text = 0, dataset.text(sample)
            for document, first, count in documents_of(dataset, sample) or [(-1, 0, len(text))]:
                name = dataset.origin(sample).rpartition(":")[0]
                loss = _masked_loss(run, sample, range(max(0, at - 1), at + count - 1))
                tokens = tuple(text[at : at + count].tolist())
                found.append(Part(sample, f"{name}:{document}+{first}", loss, tokens))
                at += count
    return found


def _masked_loss(run: TrainingRun, sample: int, labels: range) -> float:
    """Return the mean loss of a sample over the labels at the positions `labels`. The loss is computed on a micro-batch
    that contains only copies of the sample."""
    config, runtime = run.config, run.runtime
    micro = config.training.micro_batch_size or 1
    batch = collate([run.data.train.dataset[sample]] * micro, [sample] * micro)
    mask = batch["loss_mask"]
    assert mask is not None
    kept = torch.zeros_like(mask)
    kept[:, labels.start : labels.stop] = mask[:, labels.start : labels.stop]
    batches = put_on_device([batch | {"loss_mask": kept}], config.model, runtime)
    own = loss_and_tokens(run.pipeline.evaluate(batches), count_tokens(batches), runtime)
    total, tokens = all_reduce_(own, runtime.state.world).tolist()
    return total / max(tokens, 1.0)
