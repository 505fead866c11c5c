"""Save checkpoints during training: start each save, report the outcome, and wait for the save before the process
exits."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Mapping

from megatron.core.dist_checkpointing.checkpoint_writer import CheckpointWriter, SaveReport
from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import checkpoint_folder, saved_folders
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.training.checkpoints.checkpointing import RunCheckpoint
from megatron.training.hooks import Exporter
from megatron.training.initialize import Runtime
from megatron.training.metrics.console import LogLines
from megatron.training.progress import Progress
from megatron.training.reliability.run_status import record_event
from megatron.training.reliability.visible_text import visible


class RunSaver:
    """Save checkpoints of a run and report the outcome of each save. Without --save, no checkpoint is written. All
    methods are collective."""

    def __init__(self, checkpoint: RunCheckpoint, runtime: Runtime, progress: Progress, lines: LogLines) -> None:
        self.options = checkpoint.config.checkpoint
        self.writer = _writer_of(checkpoint, progress)
        """Writer of the run's checkpoints, or None without --save."""
        self.checkpoint = checkpoint
        self._runtime = runtime
        self._progress = progress
        self._lines = lines
        self.last = progress.iteration or None
        """Iteration of the checkpoint that was last saved or loaded, or None if no checkpoint was saved or loaded."""

        self._told: tuple[int, str] | None = None
        """Iteration and error message of the failed save that was printed last. Digits are removed from the message."""

        self._given_up = ""
        """Reason why the newest checkpoint is not on disk, or an empty string if it is on disk or being written."""

        self.exporters: list[Exporter] = []
        if self.writer is not None:
            self.writer.check = runtime.watchdog.check_save_folder
            found = [callback.exporter(self.writer.held) for callback in checkpoint.callbacks]
            self.exporters = [exporter for exporter in found if exporter is not None]

    def prepare(self) -> None:
        """Allocate staging memory for checkpoints, unless the run saves no checkpoints. Warn if --save contains
        checkpoints of later iterations, because this run will replace them."""
        save = self.options.save
        root = self.options.save_root
        iteration = self._progress.iteration
        later = [number for number in saved_folders(root) if number > iteration] if root is not None else []
        if later:
            self._runtime.say(
                f" --save {save} holds checkpoints of later iterations, up to {max(later)}; this run starts at "
                f"iteration {iteration} and will replace them"
                + ("" if self.options.load else "; to resume from the latest, add --load")
            )
        if self.writer is not None and self.options.save_interval:
            self.writer.prepare(self.checkpoint.contents(self._progress)[0])

    def save(self, metrics: Mapping[str, float | None]) -> None:
        """Start saving a checkpoint of the current iteration. With --no-async-save, the checkpoint is complete when
        this method returns."""
        assert self.writer is not None
        iteration, start = self._progress.iteration, time.perf_counter()
        self.last, self._given_up = iteration, ""
        self._runtime.watchdog.doing(f"saving iteration {iteration}")
        if self.exporters:  # exporters must get the previous checkpoint before the new save can delete it
            self.writer.wait()
            self.report()
        self.writer.save(iteration, *self.checkpoint.contents(self._progress, metrics))
        if self.writer.background:
            self._runtime.say(self._lines.saving(iteration, stalled=time.perf_counter() - start))
        self.report()

    def report(self) -> None:
        """Print the outcome of each save that has ended since the last call. Only the first rank prints.

        Raises CheckpointError if --fatal-save-errors is given and a save failed after all retries.
        """
        for report in self.writer.reports() if self.writer is not None else []:
            if report.error is None:
                self._runtime.watchdog.failures.saved = report.iteration
                self._runtime.say(self._lines.saved(report.iteration, report.seconds))
                self._record(report)
                self._export(report.iteration)
                continue
            message = _failure(report)
            self._record(report)
            if self._runtime.is_main:  # all ranks have the same report
                self._say_failure(report, message)
            if report.complete or report.attempts_left:
                continue
            if self.options.fatal_save_errors:
                raise CheckpointError(f"{message} (--fatal-save-errors)")
            if report.iteration == self.last:
                self._given_up = message
        self._say_exported()

    def _say_failure(self, report: SaveReport, message: str) -> None:
        """Print why a save failed. If later saves fail for the same reason, print only the iterations of these
        saves."""
        # Numbers in the message, such as the free bytes, may differ although the reason is the same.
        failure = report.iteration, re.sub(r"[\d,]+", "", str(report.error))
        if failure == self._told and not report.complete:
            message = f"checkpoint of iteration {report.iteration} was not saved, for the same reason; {_then(report)}"
        self._told = failure
        # A single write call prevents ranks from mixing their lines.
        sys.stderr.write(f"{self._runtime.launch.name(socket.gethostname())}: {visible(message)}\n")

    def _record(self, report: SaveReport) -> None:
        if self._runtime.is_main:
            error = {} if report.error is None else {"error": report.error, "complete": report.complete}
            seconds = round(report.seconds, 3)
            record_event(self.options.save, "save", iteration=report.iteration, seconds=seconds, **error)

    def _export(self, iteration: int) -> None:
        """Pass a complete checkpoint to the exporters, which run on the first rank."""
        root = self.options.save_root
        assert root is not None
        for exporter in self.exporters if self._runtime.state.world.first else ():
            exporter.add(iteration, checkpoint_folder(root, iteration))

    def _say_exported(self, wait: bool = False) -> None:
        for exporter in self.exporters:
            if wait:
                self._runtime.watchdog.doing(exporter.doing)
            for line in exporter.poll(wait):
                self._runtime.say(f" {line}")

    def wait(self) -> None:
        """Wait for the save in progress."""
        if self.writer is not None:
            self.writer.wait()

    def finish(self, hurry: bool = False) -> None:
        """Wait for the save in progress and for exports. If `hurry` is True, the process must exit quickly, and exports
        are abandoned. Raises CheckpointError if the last save failed, that is, if the final state of the run is not on
        disk."""
        if self.writer is not None:
            self._runtime.watchdog.doing(f"finishing the save at iteration {self._progress.iteration}")
            self.writer.close()
            self.report()
            if self._given_up:  # with --no-async-save, `save` has already raised the error
                raise CheckpointError(f"{self._given_up} (this was the last save of the run)")
        for line in (line for exporter in self.exporters if hurry for line in exporter.abandon()):
            self._runtime.say(f" {line}")
        self._say_exported(wait=True)


def _writer_of(checkpoint: RunCheckpoint, progress: Progress) -> CheckpointWriter | None:
    """Create the writer of the run's checkpoints, or None without --save. Collective over the world."""
    options, world = checkpoint.config.checkpoint, checkpoint.state.world
    if options.save is None:
        return None
    cleanups = [callback.clean_checkpoints for callback in checkpoint.callbacks]
    writer = CheckpointWriter(located(options.save), world, background=options.async_save, cleanups=cleanups)
    writer.held += [located(progress.loaded_from)] if progress.loaded_from else []
    return writer


def _failure(report: SaveReport) -> str:
    what = f"checkpoint of iteration {report.iteration}"
    if report.complete:
        return f"{what} is saved, but older ones could not be deleted: {report.error}"
    return f"{what} was not saved: {report.error}; {_then(report)}"


def _then(report: SaveReport) -> str:
    if not report.attempts_left:
        return "given up; earlier complete checkpoints remain"
    return f"{report.attempts_left} more attempt{'s' if report.attempts_left > 1 else ''}"
