"""Global batch size over a run, with or without ramp-up, as a function of consumed samples; and the lines that describe
model, number formats and batch. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_dims import ParallelDims
from megatron.training.config.run_config import RunConfig


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size at every point of a run.

    Sizes depend on the samples consumed before the step, so a resumed run continues with the same sizes."""

    final: int
    earlier: tuple[tuple[int, int], ...] = ()
    """(consumed samples at which it ends, batch size) of each size before the final one, in order."""

    @classmethod
    def ramp(cls, final: int, start: int, increment: int, samples: int) -> BatchSizes:
        """From `start` to `final` by `increment`, in equal shares of `samples`."""
        n = (final - start) // increment
        return cls(final, tuple((-(-(k + 1) * samples // n), start + k * increment) for k in range(n)))

    @classmethod
    def from_config(cls, config: RunConfig) -> BatchSizes:
        """Of a resolved and validated configuration."""
        training = config.training
        assert training.global_batch_size, "resolve() fills the global batch size"
        if training.step_batch_size_schedule is not None:
            steps = parse_batch_schedule(training.step_batch_size_schedule)
            ends = [tokens // config.model.seq_length for tokens, _ in steps[1:]]
            return cls(steps[-1][1], tuple((end, size) for end, (_, size) in zip(ends, steps, strict=False)))
        if training.rampup_batch_size is not None:
            return cls.ramp(training.global_batch_size, *training.rampup_batch_size)
        return cls(training.global_batch_size)

    def at(self, consumed_samples: int) -> int:
        """Samples in the step that starts after `consumed_samples`."""
        return next((size for end, size in self.earlier if consumed_samples < end), self.final)

    def iterations(self, samples: int) -> int:
        """Full steps that `samples` samples are enough for."""
        iterations, consumed = 0, 0
        for end, size in self.earlier:
            steps = min(-(-(end - consumed) // size) if end > consumed else 0, (samples - consumed) // size)
            iterations, consumed = iterations + steps, consumed + steps * size
            if consumed < end:
                return iterations
        return iterations + (samples - consumed) // self.final

    def samples(self, iterations: int) -> int:
        """Samples consumed after `iterations` steps."""
        done, consumed = 0, 0
        for end, size in self.earlier:
            steps = min(-(-(end - consumed) // size) if end > consumed else 0, iterations - done)
            done, consumed = done + steps, consumed + steps * size
        return consumed + (iterations - done) * self.final


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """(consumed tokens from which it holds, batch size) of `0:384 200B:768`, separated by spaces or commas.

    Raises ValueError if it cannot be read, does not begin at 0, or the tokens do not rise.
    """
    steps = []
    for part in text.replace(",", " ").split():
        found = re.fullmatch(r"([0-9.]+)([KMBT]?):([0-9]+)", part)
        if found is None or float(found[1]) * SUFFIXES[found[2]] % 1:
            raise ValueError(f"{part!r} must be TOKENS:SIZE, for example 200B:768")
        steps.append((int(float(found[1]) * SUFFIXES[found[2]]), int(found[3])))
    if not steps or steps[0][0] != 0:
        raise ValueError("must begin with the batch size from 0 tokens on, for example 0:384")
    if any(later <= sooner for (sooner, _), (later, _) in pairwise(steps)):
        raise ValueError("the numbers of tokens must rise")
    return steps


def legal_sizes(config: RunConfig) -> BatchSizes:
    """The batch sizes of a configuration that may break rules: constant if its schedule or ramp does; at least 1."""
    size = config.training.global_batch_size or 0
    try:
        return BatchSizes.from_config(config) if size > 0 else BatchSizes(1)
    except (ValueError, TypeError, ArithmeticError):
        return BatchSizes(size)


def num_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Forward passes of each replica in one step."""
    assert global_batch_size % (micro_batch_size * data_parallel_size) == 0, "validate() checks divisibility"
    return global_batch_size // (micro_batch_size * data_parallel_size)


def samples_of_run(config: RunConfig) -> int | None:
    """Samples of a run given in samples or tokens, the smaller of both; None where it is given in iterations, or is one
    epoch."""
    training = config.training
    if training.train_tokens is None or config.model.seq_length < 1:
        return training.train_samples
    samples = training.train_tokens // config.model.seq_length
    return samples if training.train_samples is None else min(samples, training.train_samples)


def shape_line(m: TransformerConfig) -> str:
    """Layers, width, heads, MLP."""
    heads = f"{m.num_attention_heads} heads of {m.head_dim}"
    if m.query_groups != m.num_attention_heads:
        heads += f" in {m.query_groups} groups"
    if m.value_head_dim != m.head_dim or not m.attention_facts.grouped:
        heads += f", values of {m.value_head_dim}"
    heads += m.attention_facts.described(m)
    return f"{m.num_layers} layers, hidden size {m.hidden_size}, {heads}, MLP {_width(m)} ({m.activation})"


def _width(m: TransformerConfig) -> str:
    widths = {m.ffn_sizes[number] for number in m.dense_layers}
    return f"{min(widths)} to {max(widths)}" if len(widths) > 1 else str(m.ffn_size)


def formats_of_states(config: RunConfig) -> str:
    """Number formats of parameters, gradients and optimizer states."""
    params, main, optimizer = config.parallel.params_dtype, config.parallel.main_dtype, config.optimizer
    state = optimizer.state_plan.described(optimizer, params, main)
    return f"parameters {params}, gradients {optimizer.gradients_dtype or main}, {state}"


def microbatches_of(config: RunConfig, dims: ParallelDims) -> int:
    sizes = BatchSizes.from_config(config)
    return num_microbatches(sizes.final, config.training.micro_batch_size, dims.dp)


def batch_line(config: RunConfig, dims: ParallelDims) -> str:
    """Composition of the global batch."""
    size, micro = BatchSizes.from_config(config).final, config.training.micro_batch_size
    return (
        f"{size} = micro-batch {micro} x {microbatches_of(config, dims)} micro-batches x {dims.dp} replicas; "
        f"{size * config.model.seq_length:,} tokens a step"
    )


def byte_text(size: float) -> str:
    """In the largest binary unit that keeps the number at or above 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size:.0f} B"
