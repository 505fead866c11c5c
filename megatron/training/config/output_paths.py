"""Checks before start-up that the output paths given by flags can be written. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.training.config.problem import NO_URL, Problem
from megatron.training.config.run_config import RunConfig


def why_unwritable(folder: Path) -> str | None:
    """Reason why no file can be created in a folder, which may not exist yet; None if one can. Leaves no files."""
    if folder.parts and folder.parts[0].endswith(":") and not Path(folder.parts[0]).exists():  # s3://bucket as a Path
        return f"{folder} {NO_URL[0]}"
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is a file, not a folder"
    try:
        Path(tempfile.mkdtemp(prefix=".written-", dir=nearest)).rmdir()
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror})"
    return None


def why_not_written(path: Path) -> str | None:
    """Reason why a file cannot be written, in a folder that may not exist yet; None if it can."""
    if path.exists():
        return f"{path} is not a file that can be written" if path.is_dir() or not os.access(path, os.W_OK) else None
    return why_unwritable(path.parent)


def unwritable(config: RunConfig) -> Iterator[Problem]:
    """Yields a problem for each output path that cannot be written or is a file instead of a folder."""
    logging, checkpoint = config.logging, config.checkpoint
    for flag, folder in (
        ("--save", checkpoint.save),
        ("--tensorboard-dir", logging.tensorboard_dir),
        ("--wandb-save-dir", logging.wandb_save_dir),
        ("--data-cache-path", config.data.data_cache_path),
        ("--export-hf-dir", checkpoint.export_hf_dir),
        ("--eval-tasks-samples", config.eval_tasks.eval_tasks_samples),
    ):
        if folder and (why := why_unwritable(Path(folder))):
            yield Problem(flag, folder, why, "use a folder that can be written")
    for flag, file in (("--metrics-file", logging.metrics_file), ("--sample-log", logging.sample_log)):
        if file and Path(file).is_dir():
            yield Problem(flag, file, "is a folder", "use a file in it")
        elif file and (why := why_unwritable(Path(file).parent)):
            yield Problem(flag, file, why, "use a file in a folder that can be written")
    if checkpoint.load and Path(checkpoint.load).is_file():
        yield Problem("--load", checkpoint.load, "is a file", "use the folder of the checkpoints, or one checkpoint")
