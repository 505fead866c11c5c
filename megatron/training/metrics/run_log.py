"""Output of the training loop: metric records for the sinks, and progress lines or a progress bar for the console."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from megatron.core.dist_checkpointing.path_kind import RUN_CONFIG, saved_folders
from megatron.training.config.arguments import save_config
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Meter
from megatron.training.metrics.progress_bar import Bar
from megatron.training.metrics.sinks import Record, Sink, open_sinks
from megatron.training.reliability.run_status import record_event
from megatron.training.reliability.visible_text import visible
from megatron.training.run import TrainingRun

SCHEMA = 1
"""Version of the keys and units of records, documented in docs/getting_started.md. The version increases when a key is
removed or changes its meaning. Adding a key does not change the version."""


class RunLog:
    """Log that writes records and progress on the first rank, and nothing on other ranks.

    The constructor creates the --save folder and writes the resolved configuration into it. A run that only evaluates a
    checkpoint in that folder does not write the configuration. All files are closed when `resources` is closed, or when
    the process ends after a failure.
    """

    def __init__(self, run: TrainingRun, resources: ExitStack) -> None:
        config = run.plan.base
        runtime = run.runtime
        iteration = run.progress.iteration
        self._runtime, self._lines = runtime, run.lines
        self._sinks: list[Sink] = []
        self._bar: Bar | None = None
        self._config_file: list[tuple[RunConfig, Path]] = []  # at most one pair (configuration, file path)
        if not runtime.is_main:
            return
        save = config.checkpoint.save_root
        if save is not None:
            if isinstance(save, Path):
                save.mkdir(parents=True, exist_ok=True)
            if not (config.training.skip_train and saved_folders(save)):  # do not replace the training run's file
                save_config(config, save / RUN_CONFIG)
                if isinstance(save, Path):
                    self._config_file.append((config, save / RUN_CONFIG))
                    resources.callback(self._restore_config)
            record_event(config.checkpoint.save, "start", iteration=iteration, world_size=runtime.launch.world_size)
        self._open = partial(open_sinks, config, check=runtime.watchdog.check_save_folder)
        self._sinks = self._open(iteration)
        resources.callback(self._close_sinks)
        runtime.watchdog.failures.at_exit.append(self._close_sinks)
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=run.train_iters, initial=iteration, unit="it", dynamic_ncols=True)
            resources.callback(self._bar.close)

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            sink.close()

    def go_back(self, iteration: int) -> None:
        """Drop the records after an iteration, as if the run had resumed at that iteration."""
        if self._sinks:
            self._close_sinks()
            self._sinks = self._open(iteration)
        if self._bar is not None:
            self._bar.n = iteration

    def write(self, record: Record) -> None:
        """Write a record to every sink, with the time and the schema version."""
        stamped = record | {"time": round(time.time(), 3), "schema": SCHEMA}
        for sink in self._sinks:
            sink.write(stamped)

    def report(self, record: Record, meters: Sequence[Meter]) -> None:
        """Write and print the record of an interval. The record already contains the values of the meters."""
        self._restore_config()
        for meter in meters if self._runtime.is_main else ():
            meter.write(self)
        self.write(record)
        self.say("\n".join([self._lines.progress(record), *(line for meter in meters for line in meter.lines(record))]))
        if self._bar is not None and record["lm_loss"] is not None:
            self._bar.set_postfix(loss=f"{record['lm_loss']:.4f}")

    def _restore_config(self) -> None:
        """Write the configuration file again if it is missing because the --save folder was deleted during the run and
        a save has recreated the folder."""
        for config, file in self._config_file:
            with suppress(OSError):
                if file.parent.is_dir() and not file.exists():
                    self._runtime.watchdog.check_save_folder()
                    save_config(config, file)

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is None:
            self._runtime.say(line)
        else:
            self._bar.write(visible(line))

    def step(self) -> None:
        """Advance the progress bar."""
        if self._bar is not None:
            self._bar.update(1)
