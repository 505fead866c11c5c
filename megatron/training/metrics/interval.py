"""The steps between two log lines: losses and results, which stay on the device, and their time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.core.optimizer.distrib_optimizer import StepResult


@dataclass
class Interval:
    """Collects the steps since the last log line. Never waits for the device."""

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
