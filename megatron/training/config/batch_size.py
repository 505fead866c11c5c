"""Global batch size as a function of consumed samples, and text lines that describe the model, number formats and
batch. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, Self, runtime_checkable

from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.training.config.flags import EXTENSION_SECTIONS
from megatron.training.config.run_config import Point, RunConfig

START: tuple[Point, ...] = ((0, 0),)


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size at each point of a run.

    Sizes depend on the samples consumed before the step, so a resumed run continues with the same sizes."""

    final: int
    earlier: tuple[tuple[int, int], ...] = ()
    """Batch sizes before the final batch size, in order. In each pair (end, batch size), `end` is the number of
    consumed samples up to which the batch size applies."""

    past: tuple[Point, ...] = START
    """Positions of batch-size changes, in order, in the part of the run that was trained with other flags. The batch
    sizes in `earlier` and `final` apply only after the last of these positions."""

    @classmethod
    def from_config(cls, config: RunConfig) -> BatchSizes:
        """Return the batch sizes of a resolved and validated configuration. If the run has resumed from a checkpoint,
        the earlier batch sizes are included."""
        assert config.training.global_batch_size, "resolve() fills the global batch size"
        scheduled = batch_schedule(config)
        if scheduled is not None:
            return scheduled.batch_sizes(config).resumed(config.past_batches)
        return cls(config.training.global_batch_size).resumed(config.past_batches)

    def resumed(self, past: Sequence[Point]) -> Self:
        """Return the batch sizes of a run that resumes at the last position in `past`. The earlier positions in `past`
        are those of batch-size changes."""
        if not past:
            return self
        begun = replace(self, past=tuple(past[:-1]) or START)
        iterations, consumed = past[-1]
        return begun if begun.samples(iterations) == consumed else replace(begun, past=(*begun.past, past[-1]))

    def points(self, iterations: int, consumed_samples: int) -> tuple[Point, ...]:
        """Return the value of `past` for a run that resumes after `iterations` steps and `consumed_samples` samples:
        the positions of earlier batch-size changes, followed by this position."""
        found, (done, consumed) = [point for point in self.past if point[1] <= consumed_samples], self.past[-1]
        for end, size in self.earlier:
            steps = -(-(end - consumed) // size) if end > consumed else 0
            done, consumed = done + steps, consumed + steps * size
            if consumed > consumed_samples:
                break
            if steps:
                found.append((done, consumed))
        return tuple(dict.fromkeys((*found, (iterations, consumed_samples))))

    def at(self, consumed_samples: int) -> int:
        """Return the number of samples in the step that starts after `consumed_samples`."""
        for (i, s), (j, t) in pairwise(self.past):
            if consumed_samples < t:
                return (t - s) // max(1, j - i)
        return next((size for end, size in self.earlier if consumed_samples < end), self.final)

    def iterations(self, samples: int) -> int:
        """Return the number of complete steps that can be taken with `samples` samples."""
        for (i, s), (j, t) in pairwise(self.past):
            if samples < t:
                return i + (samples - s) * (j - i) // (t - s)
        iterations, consumed = self.past[-1]
        for end, size in self.earlier:
            steps = min(-(-(end - consumed) // size) if end > consumed else 0, (samples - consumed) // size)
            iterations, consumed = iterations + steps, consumed + steps * size
            if consumed < end:
                return iterations
        return iterations + (samples - consumed) // self.final

    def samples(self, iterations: int) -> int:
        """Return how many samples the run has consumed after `iterations` steps."""
        for (i, s), (j, t) in pairwise(self.past):
            if iterations < j:
                return s + (iterations - i) * (t - s) // (j - i)
        done, consumed = self.past[-1]
        for end, size in self.earlier:
            steps = min(-(-(end - consumed) // size) if end > consumed else 0, iterations - done)
            done, consumed = done + steps, consumed + steps * size
        return consumed + (iterations - done) * self.final


@runtime_checkable
class SchedulesBatches(Protocol):
    """Base class of flags that change the batch size during a run (`megatron.training.extensions.extension_flags`)."""

    @property
    def changes_batches(self) -> bool:
        """True if a flag changes the batch size during the run."""

    def batch_sizes(self, config: RunConfig) -> BatchSizes:
        """Return the batch sizes of a run whose flags change the batch size, given a validated configuration."""


def batch_schedule(config: RunConfig) -> SchedulesBatches | None:
    """Return the flags of the extension that changes the batch size during the run, or None if the batch size is
    constant."""
    found: list[object] = [config.options(section.cls) for section in EXTENSION_SECTIONS.values()]
    return next((each for each in found if isinstance(each, SchedulesBatches) and each.changes_batches), None)


def legal_sizes(config: RunConfig) -> BatchSizes:
    """Return the batch sizes of a run, even if its configuration is not valid. All sizes are at least 1. If the
    batch-size schedule is invalid, the size is constant."""
    size = config.training.global_batch_size or 0
    try:
        return BatchSizes.from_config(config) if size > 0 else BatchSizes(1)
    except (ValueError, TypeError, ArithmeticError):
        return BatchSizes(size)


def num_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Return the number of micro-batches of each replica in one step."""
    assert global_batch_size % (micro_batch_size * data_parallel_size) == 0, "validate() checks divisibility"
    return global_batch_size // (micro_batch_size * data_parallel_size)


def samples_of_run(config: RunConfig) -> int | None:
    """Return the number of samples in a run if the flags give its length in samples or tokens. If both lengths are
    given, the shorter one applies.

    Return None if the flags give the length in iterations, or if they give no length. A run without a given length is
    one epoch.
    """
    training = config.training
    if training.train_tokens is None or config.model.seq_length < 1:
        return training.train_samples
    samples = training.train_tokens // config.model.seq_length
    return samples if training.train_samples is None else min(samples, training.train_samples)


def shape_line(m: TransformerConfig) -> str:
    """Describe the layers, width, heads and MLP of a model."""
    heads = f"{m.num_attention_heads} heads of {m.head_dim}"
    if m.query_groups != m.num_attention_heads:
        heads += f" in {m.query_groups} groups"
    if m.value_head_dim != m.head_dim or not m.attention_facts.grouped:
        heads += f", values of {m.value_head_dim}"
    heads += m.attention_mixer.described(m)
    return f"{m.num_layers} layers, hidden size {m.hidden_size}, {heads}, MLP {_width(m)} ({m.activation})"


def _width(m: TransformerConfig) -> str:
    widths = {m.ffn_sizes[number] for number in m.dense_layers}
    return f"{min(widths)} to {max(widths)}" if len(widths) > 1 else str(m.ffn_size)


def formats_of_states(config: RunConfig) -> str:
    """Describe the number formats of parameters, gradients and optimizer states."""
    params = config.parallel.params_dtype
    main = config.parallel.main_dtype
    optimizer = config.optimizer
    state = optimizer.state_plan.described(optimizer, params, main) or f"{optimizer.optimizer} state {main}"
    return f"parameters {params}, gradients {optimizer.gradients_dtype or main}, {state}"


def microbatches_of(config: RunConfig, dims: ParallelDims) -> int:
    sizes = BatchSizes.from_config(config)
    return num_microbatches(sizes.final, config.training.micro_batch_size, dims.dp)


def batch_line(config: RunConfig, dims: ParallelDims) -> str:
    """Return a line that describes how the global batch is composed."""
    size, micro = BatchSizes.from_config(config).final, config.training.micro_batch_size
    return (
        f"{size} = micro-batch {micro} x {microbatches_of(config, dims)} micro-batches x {dims.dp} replicas; "
        f"{size * config.model.seq_length:,} tokens a step"
    )


def byte_text(size: float) -> str:
    """Format a number of bytes in the largest binary unit that gives a value of at least 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size:.0f} B"
