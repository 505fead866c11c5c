"""Garbage collection on all ranks at the same steps (--manual-gc).

A collection takes tenths of a second in a large run. With Python's own thresholds it comes at a different step on each
rank, and all ranks wait for each of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from megatron.training.config.run_config import TrainingConfig


class GarbageCollection:
    """With --manual-gc disables automatic collection until `resources` close; without it does nothing."""

    def __init__(self, config: TrainingConfig, resources: ExitStack) -> None:
        self.interval = config.manual_gc_interval if config.manual_gc else 0
        self.at_evaluations = config.manual_gc and config.manual_gc_eval
        if config.manual_gc and gc.isenabled():
            gc.disable()
            resources.callback(gc.enable)
            gc.collect()

    def after_step(self, iteration: int) -> None:
        if self.interval and iteration % self.interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collects before and after this block, with --manual-gc-eval."""
        if self.at_evaluations:
            gc.collect()
        yield
        if self.at_evaluations:
            gc.collect()
