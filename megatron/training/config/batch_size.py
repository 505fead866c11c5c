"""Global batch size over a run, with or without ramp-up, as a function of consumed samples. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.run_config import RunConfig, TrainingConfig


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size at every point of a run.

    With a ramp-up it grows from `start` to `final` by `increment`, in equal shares of `ramp_samples`; what counts is
    the number of samples consumed before the step, so a resumed run goes on with the same sizes.
    """

    final: int
    start: int = 0
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def from_config(cls, training: TrainingConfig) -> BatchSizes:
        """Of a resolved and validated configuration."""
        assert training.global_batch_size, "resolve() fills the global batch size"
        if training.rampup_batch_size is None:
            return cls(training.global_batch_size)
        start, increment, samples = training.rampup_batch_size
        return cls(training.global_batch_size, start, increment, samples)

    @property
    def increments(self) -> int:
        return (self.final - self.start) // self.increment if self.increment else 0

    def at(self, consumed_samples: int) -> int:
        """Samples in the step that starts after `consumed_samples`."""
        if consumed_samples >= self.ramp_samples or not self.increments:
            return self.final
        return self.start + consumed_samples * self.increments // self.ramp_samples * self.increment

    def iterations(self, samples: int) -> int:
        """Full steps that `samples` samples are enough for."""
        iterations, consumed = 0, 0
        for end, size in self._ramp():
            steps = min(-(-(end - consumed) // size) if end > consumed else 0, (samples - consumed) // size)
            iterations, consumed = iterations + steps, consumed + steps * size
            if consumed < end:
                return iterations
        return iterations + (samples - consumed) // self.final

    def samples(self, iterations: int) -> int:
        """Samples consumed after `iterations` steps."""
        done, consumed = 0, 0
        for end, size in self._ramp():
            steps = min(-(-(end - consumed) // size) if end > consumed else 0, iterations - done)
            done, consumed = done + steps, consumed + steps * size
        return consumed + (iterations - done) * self.final

    def _ramp(self) -> list[tuple[int, int]]:
        """(consumed samples at which it ends, batch size) of each size below the final one."""
        n = self.increments
        return [(-(-(k + 1) * self.ramp_samples // n), self.start + k * self.increment) for k in range(n)]


def num_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Forward passes of each replica in one step."""
    assert global_batch_size % (micro_batch_size * data_parallel_size) == 0, "validate() checks divisibility"
    return global_batch_size // (micro_batch_size * data_parallel_size)


def samples_of_run(config: RunConfig) -> int | None:
    """Samples of a run given in samples or tokens; None where it is given in iterations, or is one epoch."""
    training = config.training
    if training.train_tokens is not None and config.model.seq_length > 0:
        return training.train_tokens // config.model.seq_length
    return training.train_samples


def iterations_of_run(config: RunConfig) -> int | None:
    """Steps of a resolved run; None where it is one epoch, whose length the data knows."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    samples = samples_of_run(config)
    return None if samples is None else BatchSizes.from_config(config.training).iterations(samples)
