"""Saves in the training loop: started, reported, and waited for before the process leaves."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.async_saver import SaveReport
from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.core.dist_checkpointing.storage import CheckpointError, saved_folders
from megatron.training.checkpointing import checkpoint_contents
from megatron.training.setup import TrainingRun


def prepare_to_save(run: TrainingRun) -> None:
    """Has memory ready for checkpoints, where more of them are to come than that of the end. Says whether there are
    some that this run is going to replace, as where --load was forgotten."""
    options, iteration = run.config.checkpoint, run.progress.iteration
    later = [number for number in saved_folders(Path(options.save)) if number > iteration] if options.save else []
    if later:
        run.runtime.say(
            f" --save {options.save} holds checkpoints of later iterations, up to {max(later)}, and this run, which "
            f"goes on from {iteration}, replaces them as it comes there"
            + ("" if options.load else "; to go on from the latest, give --load as well")
        )
    if run.saver is not None and run.config.checkpoint.save_interval:
        run.saver.prepare(_contents(run)[0])


def save(run: TrainingRun) -> None:
    """Starts a checkpoint of the present iteration; with --no-async-save it is written when this returns."""
    assert run.saver is not None
    run.guard.store(run)
    iteration, start = run.progress.iteration, time.perf_counter()
    run.runtime.watch.begin(f"saving iteration {iteration}")
    run.saver.save(iteration, *_contents(run))
    if run.saver.background:
        run.runtime.say(f" saving checkpoint at iteration {iteration}, stalled for {time.perf_counter() - start:.2f} s")
    tell_of_saves(run)


def _contents(run: TrainingRun) -> tuple[StateDict, dict[str, Any]]:
    return checkpoint_contents(run.config, run.runtime.state, run.stages, run.optimizer, run.progress, run.measured)


def tell_of_saves(run: TrainingRun, last: bool = False) -> None:
    """Says what came of saves since it was last called: a success once, a failure on every rank.

    Raises CheckpointError where a save was given up, under --fatal-save-errors or if it was the `last` of the run.
    """
    if run.saver is None:
        return
    for report in run.saver.reports():
        if report.error is None:
            folder = run.config.checkpoint.save
            run.runtime.say(f" saved checkpoint at iteration {report.iteration} to {folder} in {report.seconds:.2f} s")
            continue
        message = _failure(report)
        launch = run.runtime.launch
        who = f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()}"
        sys.stderr.write(f"{who}: {message}\n")  # in one piece, as other ranks write at the same time
        given_up = not report.complete and not report.attempts_left
        if given_up and (last or run.config.checkpoint.fatal_save_errors):
            raise CheckpointError(f"{message} ({'it was the last of the run' if last else '--fatal-save-errors'})")


def finish_saves(run: TrainingRun) -> None:
    """Waits for the save under way. Raises CheckpointError if the last one failed: the run's end is not on disk."""
    if run.saver is None:
        return
    run.runtime.watch.begin(f"finishing the save at iteration {run.progress.iteration}")
    run.saver.close()
    tell_of_saves(run, last=True)


def _failure(report: SaveReport) -> str:
    what = f"checkpoint of iteration {report.iteration}"
    if report.complete:
        return f"{what} is saved, but older ones could not be deleted: {report.error}"
    then = (
        f"{report.attempts_left} more attempt{'s' if report.attempts_left > 1 else ''}"
        if report.attempts_left
        else "given up, and the last checkpoint that was saved stands"
    )
    return f"{what} was not saved: {report.error}; {then}"
